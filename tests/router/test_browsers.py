"""Another site's page cannot use a server without an API key, whatever host name it uses."""

from __future__ import annotations

import pytest

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
