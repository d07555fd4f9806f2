"""Unusable certificates are reported at start, by flag and file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.transfer.certificates import Authority
from deploy.config import load_config
from messaging.files import TlsFiles, tls_files
from protocol.config import ServeConfig
from protocol.errors import ConfigError

TRANSPORTS = {"kv_transports": "shm,tcp"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue("worker")


FIELDS = ["kv_tls_cert", "kv_tls_key", "kv_tls_ca", "tls_cert", "tls_key"]


def flags(files: TlsFiles, kind: str = "kv_tls", **changes: Any) -> dict[str, Any]:
    """Return the flags of transfers' files, or of those for HTTPS."""
    if kind == "tls":
        return {"tls_cert": files.cert, "tls_key": files.key} | changes
    given = {"kv_tls_cert": files.cert, "kv_tls_key": files.key, "kv_tls_ca": files.ca}
    return TRANSPORTS | given | changes


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(given, {})
    return str(caught.value)


def refusal_of(files: TlsFiles, field: str, path: str | Path | None) -> str:
    """Return why this path is refused, without the flag that the message begins with."""
    said = refusal(flags(files, field.rpartition("_")[0], **{field: path and str(path)}))
    flag, _, reason = said.partition(": ")
    assert flag == f"--{field.replace('_', '-')}"
    return reason


def test_matching_files_are_accepted(files: TlsFiles) -> None:
    assert tls_files(load_config(flags(files), {})) == files
    assert tls_files(ServeConfig()) is None


@pytest.mark.parametrize("field", FIELDS)
def test_all_files_are_needed_together(files: TlsFiles, field: str) -> None:
    flag = f"--{field.rpartition('_')[0].replace('_', '-')}-"
    assert refusal_of(files, field, None).startswith(f"must be given together with {flag}")


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_others_can_change_is_refused(files: TlsFiles, tmp_path: Path, field: str) -> None:
    """Whoever can change the authority, or both certificate and key, decides whom peers trust."""
    planted = tmp_path / "planted.pem"
    planted.write_bytes(Path(getattr(files, field.rpartition("_")[2])).read_bytes())
    planted.chmod(0o666)
    assert "(mode 666)" in refusal_of(files, field, planted)
    planted.chmod(0o644)
    if field.endswith("_key"):
        reason = f"others can read or change {planted} (mode 644): chmod 600 {planted}"
        assert refusal_of(files, field, planted) == reason


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_cannot_be_read_is_named(files: TlsFiles, tmp_path: Path, field: str) -> None:
    for path, why in ((tmp_path / "nothing.pem", "No such file"), (tmp_path, "directory")):
        said = refusal_of(files, field, path)
        assert said.startswith(f"cannot read {path}: ") and why in said


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("content", [b"", b"not a PEM file\n", os.urandom(300)])
def test_a_file_of_another_kind_is_named(files: TlsFiles, tmp_path: Path, field: str, content: bytes) -> None:
    path = tmp_path / "file.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    kind = "unencrypted private key" if field.endswith("_key") else "certificate"
    assert refusal_of(files, field, path).startswith(f"{path} holds no {kind} (PEM)")


@pytest.mark.parametrize("field", ["kv_tls_key", "tls_key"])
def test_a_key_of_another_certificate_is_refused(authority: Authority, files: TlsFiles, field: str) -> None:
    other = authority.issue("other")
    assert refusal_of(files, field, other.key) == f"{other.key} is not the key of {files.cert}"


def test_a_key_with_a_password_is_refused_without_a_prompt(files: TlsFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", files.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    said = refusal(flags(files, kv_tls_key=str(locked)))
    assert said.startswith(f"--kv-tls-key: {locked} holds no unencrypted private key")


def test_a_certificate_of_another_authority_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path / "others")
    said = refusal(flags(files, kv_tls_ca=str(other.ca)))
    assert said.startswith(f"--kv-tls-cert: {files.cert} does not pass --kv-tls-ca {other.ca}: ")


def test_a_certificate_for_servers_alone_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Each worker is a client as well as a server."""
    extensions = tmp_path / "extensions"
    extensions.write_text("extendedKeyUsage=serverAuth\n")
    files = authority.issue("server", "-days", "2", "-extfile", str(extensions))
    assert "does not pass" in refusal(flags(files))


@pytest.mark.parametrize("kind", ["kv_tls", "tls"])
def test_an_expired_certificate_is_refused(authority: Authority, kind: str) -> None:
    files = authority.issue("expired", "-days", "-1")
    said = refusal(flags(files, kind))
    assert said.startswith(f"--{kind.replace('_', '-')}-cert: {files.cert} ")
    assert said.endswith("certificate has expired" + (": renew it" if kind == "tls" else ""))


def test_transports_that_do_not_encrypt_are_refused_with_it(files: TlsFiles) -> None:
    assert refusal(flags(files, kv_transports="shm,ucx,tcp")).startswith(
        "--kv-transports: ucx does not encrypt"
    )
    assert refusal(flags(files, kv_transports="shm")).startswith("--kv-tls-cert: is for tcp")
