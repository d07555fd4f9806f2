"""Files that flags name: secrets, certificates of workers and of HTTPS, and files for results.

A file that others can change, or a secret that they can read, is refused at the start.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec

from native.ownership import OwnershipError, read_own
from protocol.errors import ConfigError
from protocol.server_options import ApiOptions, TransferOptions


def read_private(path: str, flag: str) -> bytes:
    """Return the file's bytes. Raises `ConfigError` if it is unreadable, or others may read or write it."""
    return _read(path, flag, private=True)


def read_trusted(path: str, flag: str) -> bytes:
    """Return the file's bytes. Raises `ConfigError` if it is unreadable, or others may write it."""
    return _read(path, flag, private=False)


def _read(path: str, flag: str, private: bool) -> bytes:
    try:
        return read_own(path, private=private)
    except OwnershipError as error:
        raise ConfigError(f"{flag}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error


def check_output_file(path: Path, flag: str) -> None:
    """Raise `ConfigError` if no file can be written there. Call it before the work of which it gets the
    result.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written")


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files, the same on every host: the workers' certificate chain, its key, the CA's certificate."""

    cert: str
    key: str
    ca: str

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Return a context for mutual TLS 1.3 with peers whose certificate the authority signed.

        Host names are not checked. Raises ConfigError for files that are unreadable or do not belong
        together.
        """
        read_trusted(self.cert, "--kv-tls-cert")
        read_trusted(self.ca, "--kv-tls-ca")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server_side:
            context.num_tickets = (
                0  # sessions are never resumed, and tickets would make an idle connection send data
            )
        _load_authority("--kv-tls-ca", self.ca, context)
        _load_pair("--kv-tls", self.cert, self.key, context)
        return context

    def check(self) -> None:
        """Do a handshake between both sides in memory. Raises ConfigError if it fails."""
        refusal = _meet(self.context(server_side=False), self.context(server_side=True))
        if refusal is not None:
            raise ConfigError(f"--kv-tls-cert: {self.cert} does not pass --kv-tls-ca {self.ca}: {refusal}")


def http_tls(config: ApiOptions) -> ssl.SSLContext | None:
    """Return the context for HTTPS, or None if unset. Raises ConfigError, also for expired certificates."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    read_trusted(config.tls_cert, "--tls-cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair("--tls", config.tls_cert, config.tls_key, context)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(config.tls_cert)
    refusal = _meet(client, context)
    if refusal is not None:
        raise ConfigError(f"--tls-cert: {config.tls_cert} is of no use: {refusal}: renew it")
    return context


def _meet(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> str | None:
    """Do a handshake between two contexts in memory. Return the reason if it fails."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        server.do_handshake()
    except ssl.SSLError as error:
        return str(getattr(error, "verify_message", None) or error.reason)
    return None


def _load_pair(flags: str, cert: str, key: str, context: ssl.SSLContext) -> None:
    read_private(key, f"{flags}-key")
    _load_authority(f"{flags}-cert", cert, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{flags}-key: {key} is not the key of {cert}") from error
        raise ConfigError(
            f"{flags}-key: {key} holds no unencrypted private key (PEM): {error.reason or error}"
        ) from error


def _load_authority(flag: str, path: str, context: ssl.SSLContext) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag}: {path} holds no certificate (PEM)") from error


def tls_files(config: TransferOptions) -> TlsFiles | None:
    """Return the certificates that encrypt `tcp` transfers, or None without `--kv-tls-cert`."""
    if config.kv_tls_cert is None or config.kv_tls_key is None or config.kv_tls_ca is None:
        return None
    return TlsFiles(cert=config.kv_tls_cert, key=config.kv_tls_key, ca=config.kv_tls_ca)
