"""Browsers' requests from other sites are refused, and HTTPS has the same limits and streams as HTTP."""

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

BODY = {"prompt": "the quick brown fox", "max_tokens": 2}
SAME = "http://127.0.0.1:{port}"
FOREIGN = ("http://evil.example", "https://127.0.0.1:{port}.evil.example", "http://127.0.0.1:1", "null", "")


def ask(router, method: str = "POST", path: str = "/v1/completions", **headers: str) -> int:
    headers = {name: value.format(port=router.server.port) for name, value in headers.items()}
    body = BODY if method == "POST" else None
    return router.http.request(method, path, json=body, headers=headers).status_code


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_other_sites_start_nothing(router, origin):
    assert ask(router, origin=origin) == 403
    assert ask(router, path="/workers/decode-0/drain", origin=origin) == 403
    assert ask(router, origin=SAME) == 200
    assert ask(router) == 200


def test_a_form_does_not_avoid_the_check(router):
    """A browser sends a form without asking the server first, but always with its origin."""
    headers = {"content-type": "text/plain", "origin": "http://evil.example"}
    content = b'{"prompt": "x", "max_tokens": 1}'
    answer = router.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["type"] == "permission_error"
    assert "http://evil.example" in error["message"] and "--api-key-file" in error["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1", "1.2.3"]
)
def test_a_foreign_name_that_resolves_here_is_refused(router, host):
    for path in ("/v1/models", "/requests", "/workers", "/"):
        assert ask(router, "GET", path, host=host) == 403
    assert ask(router, host=host, origin=f"http://{host}") == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:{port}", "[::1]:9", "10.0.0.1", "gpu-3", ""]
)
def test_local_names_and_addresses_pass(router, host):
    assert ask(router, "GET", "/v1/models", host=host) == 200


def test_with_a_key_any_name_and_page_is_allowed(make_router):
    router = make_router(api_key="secret")
    router.add_worker()
    key = {"authorization": "Bearer secret"}
    assert ask(router, host="llm.example", origin="https://app.example", **key) == 200
    assert ask(router, host="llm.example", origin="https://app.example") == 401


def test_allowed_origins_may_use_the_api(make_router):
    router = make_router(allowed_origins="https://app.example,https://b.example")
    router.add_worker()
    allowed, foreign = {"origin": "https://b.example"}, {"origin": "http://evil.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for method, more in (("POST", {}), ("OPTIONS", asked)):
        answer = router.http.request(method, "/v1/completions", json=BODY, headers=allowed | more)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://b.example"
    assert answer.headers["access-control-allow-headers"] == "authorization"
    assert ask(router, **foreign) == 403
    assert "access-control-allow-origin" not in router.http.get("/v1/models", headers=foreign).headers
    assert ask(make_router(allowed_origins="*"), "GET", "/v1/models", **foreign) == 200


def test_a_server_on_all_addresses_accepts_any_name(make_router):
    router = make_router(host="0.0.0.0")
    router.add_worker()
    assert ask(router, "GET", "/v1/models", host="llm.example") == 200
    assert ask(router, host="llm.example", origin="http://llm.example") == 200
    assert ask(router, host="llm.example", origin="http://evil.example") == 403


NAMES = ("-days", "2", "-extfile")
HTTPS_BODY = {"prompt": "the quick brown fox", "max_tokens": 5}


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
        whole = http.post("/v1/completions", json=HTTPS_BODY).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**HTTPS_BODY, "stream": True}) as answer:
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
