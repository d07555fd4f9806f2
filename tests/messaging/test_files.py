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


def flags(files: TlsFiles, **changes: Any) -> dict[str, Any]:
    given = {"kv_tls_cert": files.cert, "kv_tls_key": files.key, "kv_tls_ca": files.ca}
    return TRANSPORTS | given | changes


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(given, {})
    return str(caught.value)


def test_matching_files_are_accepted(files: TlsFiles) -> None:
    assert tls_files(load_config(flags(files), {})) == files
    assert tls_files(ServeConfig()) is None


@pytest.mark.parametrize("missing", ["kv_tls_cert", "kv_tls_key", "kv_tls_ca"])
def test_all_three_files_are_needed_together(files: TlsFiles, missing: str) -> None:
    said = refusal(flags(files, **{missing: None}))
    assert said.startswith(f"--{missing.replace('_', '-')}: must be given together with --kv-tls-")


@pytest.mark.parametrize("field", ["kv_tls_cert", "kv_tls_key", "kv_tls_ca", "tls_cert", "tls_key"])
def test_a_file_that_others_can_change_is_refused(files: TlsFiles, tmp_path: Path, field: str) -> None:
    """Whoever can change the authority, or both certificate and key, decides whom peers trust."""
    planted = tmp_path / "planted.pem"
    planted.write_bytes(Path(getattr(files, field.rpartition("_")[2])).read_bytes())
    planted.chmod(0o666)
    given = flags(files) if field.startswith("kv") else {"tls_cert": files.cert, "tls_key": files.key}
    said = refusal(given | {field: str(planted)})
    assert said.startswith(f"--{field.replace('_', '-')}: ") and "(mode 666)" in said


@pytest.mark.parametrize("field", ["kv_tls_cert", "kv_tls_key", "kv_tls_ca"])
def test_a_file_that_cannot_be_read_is_named(files: TlsFiles, tmp_path: Path, field: str) -> None:
    flag = "--" + field.replace("_", "-")
    for path, why in ((tmp_path / "nothing.pem", "No such file"), (tmp_path, "directory")):
        said = refusal(flags(files, **{field: str(path)}))
        assert said.startswith(f"{flag}: cannot read {path}: ") and why in said


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("kv_tls_cert", "holds no certificate"),
        ("kv_tls_key", "holds no unencrypted private key"),
        ("kv_tls_ca", "holds no certificate"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"not a PEM file\n", os.urandom(300)])
def test_a_file_of_another_kind_is_named(
    files: TlsFiles, tmp_path: Path, field: str, said: str, content: bytes
) -> None:
    path = tmp_path / "file.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    flag = "--" + field.replace("_", "-")
    assert refusal(flags(files, **{field: str(path)})).startswith(f"{flag}: {path} {said}")


def test_a_key_of_another_certificate_is_refused(authority: Authority, files: TlsFiles) -> None:
    other = authority.issue("other")
    said = refusal(flags(files, kv_tls_key=other.key))
    assert said == f"--kv-tls-key: {other.key} is not the key of {files.cert}"


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


def test_an_expired_certificate_is_refused(authority: Authority) -> None:
    files = authority.issue("expired", "-days", "-1")
    assert "certificate has expired" in refusal(flags(files))


def test_transports_that_do_not_encrypt_are_refused_with_it(files: TlsFiles) -> None:
    assert refusal(flags(files, kv_transports="shm,ucx,tcp")).startswith(
        "--kv-transports: ucx does not encrypt"
    )
    assert refusal(flags(files, kv_transports="shm")).startswith("--kv-tls-cert: is for tcp")
