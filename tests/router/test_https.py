"""HTTPS: the same limits and streams as HTTP; wrong certificates are refused at the start."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.transfer.certificates import Authority
from deploy.config import load_config
from messaging.files import TlsFiles
from protocol.errors import ConfigError
from router import server as router_server

NAMES = ("-days", "2", "-extfile")
BODY = {"prompt": "the quick brown fox", "max_tokens": 5}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    names = tmp_path_factory.mktemp("names") / "names"
    names.write_text("subjectAltName=IP:127.0.0.1")
    return authority.issue("server", "-days", "2", "-extfile", str(names))


@pytest.fixture
def https(make_router, files):
    router = make_router(tls_cert=files.cert, tls_key=files.key)
    router.add_worker()
    return router


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.ca)


def test_completions_and_streams(https, files):
    assert https.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=https.url, verify=trusting(files), timeout=60) as http:
        whole = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        assert http.post("/v1/completions", content=b"x" * 1000).status_code == 400


def test_a_client_that_does_not_trust_the_authority_gets_an_error(https):
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(https.url + "/health")


def test_refused_heads_get_their_answer(https, files, caplog):
    """A TLS connection cannot be closed in one direction only."""
    plain = socket.create_connection(("127.0.0.1", https.server.port), timeout=10)
    with trusting(files).wrap_socket(plain, server_hostname="127.0.0.1") as client:
        client.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
        assert client.recv(1) == b""
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_old_protocols_and_plain_http_get_nothing(https, files):
    context = trusting(files)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    plain = socket.create_connection(("127.0.0.1", https.server.port), timeout=10)
    with plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
    with pytest.raises(httpx.TransportError):
        httpx.get(https.url.replace("https", "http") + "/health")


def test_handshakes_have_a_deadline(make_router, files, monkeypatch):
    monkeypatch.setattr(router_server, "HEAD_TIMEOUT_S", 0.2)
    router = make_router(tls_cert=files.cert, tls_key=files.key)
    with socket.create_connection(("127.0.0.1", router.server.port), timeout=10) as silent:
        assert silent.recv(1) == b""


def test_commands_use_https(https, files):
    command = [sys.executable, "-m", "deploy", "status", "--once", "--url", https.url]
    trusted = {**os.environ, "SSL_CERT_FILE": files.ca}
    done = subprocess.run(command, env=trusted, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "decode-0" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "SSL_CERT_FILE" in done.stderr
    assert done.stderr.count("\n") == 1


def refusal(**given: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(given, {})
    return str(caught.value)


def test_unusable_files_are_named(files, authority, tmp_path):
    cert, key = files.cert, files.key
    assert refusal(tls_cert=cert) == "--tls-key: must be given together with --tls-cert"
    assert refusal(tls_key=key) == "--tls-cert: must be given together with --tls-key"
    none = str(tmp_path / "none.pem")
    for field, flag in (("tls_cert", "--tls-cert"), ("tls_key", "--tls-key")):
        given = {"tls_cert": cert, "tls_key": key} | {field: none}
        assert refusal(**given) == f"{flag}: cannot read {none}: No such file or directory"
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    text.chmod(0o600)
    assert refusal(tls_cert=str(text), tls_key=key) == f"--tls-cert: {text} holds no certificate (PEM)"
    assert "holds no unencrypted private key (PEM)" in refusal(tls_cert=cert, tls_key=str(text))
    other = authority.issue("other")
    assert refusal(tls_cert=cert, tls_key=other.key) == f"--tls-key: {other.key} is not the key of {cert}"


def test_an_expired_or_future_certificate_is_refused(authority):
    old = authority.issue("old", "-days", "-1")
    said = refusal(tls_cert=old.cert, tls_key=old.key)
    assert said == f"--tls-cert: {old.cert} is of no use: certificate has expired: renew it"


@pytest.mark.parametrize("flags", ["tls", "kv_tls"])
def test_a_key_that_others_can_read_is_refused(authority, flags):
    loose = authority.issue(f"loose-{flags}")
    Path(loose.key).chmod(0o644)
    given = {f"{flags}_cert": loose.cert, f"{flags}_key": loose.key}
    if flags == "kv_tls":
        given |= {"kv_tls_ca": loose.ca, "kv_transports": "tcp"}
    said = refusal(**given)
    flag = f"--{flags.replace('_', '-')}-key"
    assert said == f"{flag}: others can read or change {loose.key} (mode 644): chmod 600 {loose.key}"
