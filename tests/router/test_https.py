"""HTTPS has the same limits and streams as HTTP."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import subprocess
import sys

import httpx
import pytest

from bench.transfer.certificates import Authority
from messaging.files import TlsFiles
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
