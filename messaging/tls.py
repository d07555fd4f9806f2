"""The certificates for TLS between workers: what is wrong with them is said at start, by flag and file."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from protocol.config import ServeConfig
from protocol.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files, the same on every host: the workers' certificate (chain), its key, and the authority's."""

    cert: str
    key: str
    ca: str

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """Mutual TLS 1.3 with peers whose certificate the authority signed; hosts' names are not looked at.

        Raises ConfigError for files that cannot be read, or don't fit each other.
        """
        for flag, path in (("cert", self.cert), ("key", self.key), ("ca", self.ca)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"--kv-tls-{flag}: cannot read {path}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server_side:
            context.num_tickets = 0  # nobody resumes, and an idle connection stays silent
        _load_authority("cert", self.cert, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        _load_authority("ca", self.ca, context)
        self._load_key(context)
        return context

    def check(self) -> None:
        """Let the two sides meet in memory. Raises ConfigError for what would keep workers apart."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.context(server_side=False).wrap_bio(to_client, to_server)
        server = self.context(server_side=True).wrap_bio(to_server, to_client, server_side=True)
        try:
            for side in (client, server, client):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
            server.do_handshake()
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", None) or error.reason
            raise ConfigError(
                f"--kv-tls-cert: {self.cert} does not pass --kv-tls-ca {self.ca}: {reason}"
            ) from error

    def _load_key(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(f"--kv-tls-key: {self.key} is not the key of {self.cert}") from error
            raise ConfigError(
                f"--kv-tls-key: {self.key} holds no unencrypted private key (PEM): {error.reason or error}"
            ) from error


def _load_authority(flag: str, path: str, context: ssl.SSLContext) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"--kv-tls-{flag}: {path} holds no certificate (PEM)") from error


def tls_files(config: ServeConfig) -> TlsFiles | None:
    """The certificates that `tcp` encrypts with, if it does."""
    if config.kv_tls_cert is None or config.kv_tls_key is None or config.kv_tls_ca is None:
        return None
    return TlsFiles(cert=config.kv_tls_cert, key=config.kv_tls_key, ca=config.kv_tls_ca)
