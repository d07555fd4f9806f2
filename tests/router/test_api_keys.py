"""Keys of --api-key-file: access, limits of each key, and changes without a restart."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from protocol.config import ServeConfig
from router import api_keys
from router.api_keys import KeyEntry, add_key
from router.observe.metrics import Metrics
from router.workers.registry import Registry
from tests.router.router_clients import eventually
from tests.router.test_api_docs import OPEN

BODY = {"prompt": "the quick brown fox", "max_tokens": 3}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(api_keys, "RELOAD_INTERVAL_S", 0.05)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def start(make_router, path, **options):
    router = make_router(api_key_file=path, **options)
    router.add_worker()
    return router


def ask(router, key: str, **fields):
    return router.http.post("/v1/completions", json={**BODY, **fields}, headers=bearer(key))


def test_only_keys_of_the_file_get_in_and_only_operators_operate(make_router, path, caplog):
    client, operator = add_key(path, name="client"), add_key(path, name="boss", operator=True)
    router = start(make_router, path, api_key="sk-given")
    for key in (client, operator, "sk-given"):
        assert ask(router, key).status_code == 200
        assert router.http.post("/tokenize", json={"prompt": "x"}, headers=bearer(key)).status_code == 200
    for key in ("wrong", client + "x", Path(path).read_text().split('"')[7]):
        assert ask(router, key).status_code == 401
    for where in ("/workers", "/cluster", "/requests", "/decisions", "/doctor?seconds=0.1"):
        answer = router.http.get(where, headers=bearer(client))
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert router.http.get(where, headers=bearer(operator)).status_code == 200
        assert router.http.get(where).status_code == 401
    drain = "/workers/decode-0/drain"
    assert router.http.post(drain, headers=bearer(client)).status_code == 403
    shown = router.http.get("/metrics").text + caplog.text
    assert 'api_key="client"' in shown and 'api_key="0"' in shown
    assert client not in shown and "sk-given" not in shown


def test_a_changed_file_needs_no_restart(make_router, path, caplog):
    first = add_key(path, name="first")
    router = start(make_router, path)
    second = add_key(path, name="second")
    eventually(lambda: ask(router, second).status_code == 200)
    kept = Path(path).read_text().splitlines()[1]
    Path(path).write_text(kept)
    eventually(lambda: ask(router, first).status_code == 401)
    reloads = router.metric("tandem_api_key_reloads_total", outcome="ok")
    Path(path).write_text("{")
    eventually(lambda: router.metric("tandem_api_key_reloads_total", outcome="failed") == 1)
    assert "the API keys stay as they were: --api-key-file:" in caplog.text
    assert ask(router, second).status_code == 200
    os.remove(path)
    eventually(lambda: router.metric("tandem_api_key_reloads_total", outcome="failed") == 2)
    assert ask(router, second).status_code == 200
    Path(path).touch(0o600)
    eventually(lambda: ask(router, second).status_code == 401)
    for _ in range(3):
        router.server.state.keys.check_file()  # one check more than there are changes
    assert router.metric("tandem_api_key_reloads_total", outcome="ok") == reloads + 1


def test_a_hanging_disk_blocks_nobody(make_router, path, monkeypatch):
    key = add_key(path, name="first")
    router = start(make_router, path)
    hangs, goes_on = threading.Event(), threading.Event()

    def read(_: str) -> list[KeyEntry]:
        hangs.set()
        goes_on.wait(20)
        return []

    monkeypatch.setattr(api_keys, "read_key_file", read)
    Path(path).write_text("")
    assert hangs.wait(10)
    assert ask(router, key).status_code == 200
    goes_on.set()
    eventually(lambda: ask(router, key).status_code == 401)


def refused(answer, limit: str, router) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    assert router.metric("tandem_requests_refused_total", reason=limit) >= 1
    return error["message"]


def test_requests_per_minute(make_router, path):
    key, other = (add_key(path, name=f"alice{most}", requests_per_minute=most) for most in (3, 4))
    router = start(make_router, path)
    assert [ask(router, key).status_code for _ in range(3)] == [200] * 3
    answer = ask(router, key)
    assert "alice3 may use 3 requests a minute" in refused(answer, "key_requests", router)
    assert 15 <= int(answer.headers["retry-after"]) <= 20
    assert ask(router, other).status_code == 200
    assert ask(router, key, n=2, max_tokens="wrong").status_code == 429  # refused before its body is read
    assert ask(router, other, n=4).status_code == 200
    assert int(ask(router, other).headers["retry-after"]) > 20


def test_a_new_limit_counts_earlier_use(make_router, path):
    key = add_key(path, name="alice", requests_per_minute=2)
    router = start(make_router, path)
    assert [ask(router, key).status_code for _ in range(3)] == [200, 200, 429]
    entry = json.loads(Path(path).read_text()) | {"requests_per_minute": 3}
    Path(path).write_text(json.dumps(entry))
    eventually(lambda: router.metric("tandem_api_key_reloads_total", outcome="ok") == 1)
    assert [ask(router, key).status_code for _ in range(2)] == [200, 429]


def test_tokens_per_minute(make_router, path):
    key = add_key(path, name="alice", tokens_per_minute=20)
    router = start(make_router, path)
    usage = ask(router, key, max_tokens=12).json()["usage"]
    assert usage["total_tokens"] < 20
    assert ask(router, key, max_tokens=100).status_code == 200  # the rest may be overdrawn
    answer = ask(router, key)
    assert "may use 20 tokens a minute" in refused(answer, "key_tokens", router)
    assert int(answer.headers["retry-after"]) > 200


def test_concurrent_requests(make_router, path, pool):
    key = add_key(path, name="alice", concurrent_requests=2)
    router = start(make_router, path)
    (worker,) = router.workers
    worker.hold.set()
    running = [pool.submit(ask, router, key) for _ in range(2)]
    eventually(lambda: len(worker.jobs) == 2)
    message = refused(ask(router, key), "key_concurrent", router)
    assert message == "the API key alice may have 2 requests under way, as --api-key-file says"
    worker.hold.clear()
    assert [each.result(20).status_code for each in running] == [200, 200]
    assert ask(router, key, n=2).status_code == 200
    assert ask(router, key, n=3).status_code == 429


@pytest.mark.parametrize("limit", [{"concurrent_requests": 1}, {"tokens_per_minute": 50}])
def test_a_disconnected_client_gives_back_what_it_does_not_use(make_router, path, limit):
    key = add_key(path, name="alice", **limit)
    router = make_router(api_key_file=path)
    router.add_worker(stall_after=1)
    stored = router.http.get("/v1/responses/none", headers=bearer(key))
    assert stored.status_code == 404, "it counts once"
    body = {**BODY, "stream": True, "max_tokens": 400}
    with router.http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert ask(router, key, max_tokens=1).status_code == 429
    eventually(lambda: ask(router, key, max_tokens=1).status_code == 200)


def test_a_key_has_a_priority_and_clients_can_only_lower_theirs(make_router, path):
    urgent, usual, boss = (
        add_key(path, name=name, priority=priority, operator=name == "boss")
        for name, priority in (("urgent", -5), ("usual", 0), ("boss", 0))
    )
    router = start(make_router, path)
    (worker,) = router.workers
    for key, asked, priority in (
        (urgent, None, -5),
        (urgent, -9, -5),
        (urgent, 7, 2),
        (usual, -9, 0),
        (usual, 2**31 - 1, 2**31 - 1),
        (boss, -9, -9),
    ):
        assert ask(router, key, priority=asked).status_code == 200
        assert worker.generated[-1].priority == priority


def test_every_endpoint_counts_a_request_before_it_reads_the_body(make_router, path):
    key = add_key(path, name="boss", operator=True, requests_per_minute=1)
    router = start(make_router, path)
    assert ask(router, key).status_code == 200
    paths = router.http.get("/openapi.json").json()["paths"]
    asked = [(method, where) for where, methods in paths.items() for method in methods if where not in OPEN]
    assert len(asked) > 15
    for method, where in asked:
        answer = router.http.request(method, re.sub(r"\{.*?\}", "x", where), headers=bearer(key), content="{")
        assert "boss may use 1 requests a minute" in refused(answer, "key_requests", router), where


@pytest.mark.parametrize(
    ("where", "body", "status"),
    [
        ("/tokenize", {"prompt": "x"}, 200),
        ("/v1/completions", {**BODY, "structured_outputs": {"grammar": "root ::= undefined"}}, 400),
    ],
)
def test_requests_at_once_cannot_pass_the_limit(make_router, path, pool, where, body, status):
    key = add_key(path, name="alice", requests_per_minute=3, concurrent_requests=3)
    router = start(make_router, path)

    def send(_):
        return router.http.post(where, json=body, headers=bearer(key)).status_code

    assert sorted(pool.map(send, range(20))) == [status] * 3 + [429] * 17


def test_a_request_counts_while_its_body_arrives(make_router, path):
    key = add_key(path, name="alice", concurrent_requests=1)
    router = start(make_router, path)
    with socket.create_connection(("127.0.0.1", router.server.port)) as client:
        head = (
            f"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 9\r\n\r\n"
        )
        client.sendall(head.encode())
        eventually(lambda: ask(router, key).status_code == 429)
    eventually(lambda: ask(router, key).status_code == 200)


def test_tokens_at_once_cannot_pass_the_limit(make_router, path, pool):
    """Tokens are reserved as requests come, so only the last one may exceed the rest."""
    key = add_key(path, name="alice", tokens_per_minute=500)
    router = start(make_router, path)
    (worker,) = router.workers
    worker.hold.set()
    running = [pool.submit(ask, router, key, max_tokens=150, n=2) for _ in range(8)]
    eventually(lambda: sum(each.done() for each in running) == 6)
    assert {each.result().status_code for each in running if each.done()} == {429}
    worker.hold.clear()
    assert sorted(each.result(20).status_code for each in running) == [200] * 2 + [429] * 6


def test_unused_reserved_tokens_are_returned(make_router, path):
    key = add_key(path, name="alice", tokens_per_minute=150)
    router = make_router(api_key_file=path)
    router.add_worker(script=lambda request: request.prompt_token_ids[:2], finish_reason="stop")
    message = {"role": "user", "content": "the quick brown fox"}
    for where, body in (
        ("/v1/completions", {**BODY, "max_tokens": 400}),
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/responses", {"input": [message]}),
        ("/v1/messages", {"messages": [message], "max_tokens": 400}),
    ):
        for _ in range(2):
            answer = router.http.post(where, json=body, headers=bearer(key))
            assert (answer.status_code, router.workers[0].generated[-1].sampling.max_tokens >= 400) == (
                200,
                True,
            )


def test_a_request_that_is_not_started_uses_no_tokens(make_router, path, pool):
    key, other = add_key(path, name="alice", tokens_per_minute=10), add_key(path, name="bob")
    router = start(make_router, path, max_queued_requests=2)
    (worker,) = router.workers
    worker.hold.set()
    running = pool.submit(ask, router, other)
    eventually(lambda: worker.generated)
    for _ in range(5):
        answer = ask(router, key, n=2, max_tokens=200)
        assert answer.json()["error"]["code"] == "overloaded"
    worker.hold.clear()
    assert running.result(20).status_code == 200
    assert ask(router, key).status_code == 200


def test_use_before_there_was_a_limit_is_forgotten(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(api_keys.time, "monotonic", lambda: now)
    minute = api_keys.LeakyBucket()
    minute.fill(10_000, None)
    assert minute.wait_s(60) == 0
    now += 3600
    minute.fill(61, 60)  # an hour of silence earns no credit for that hour
    assert minute.wait_s(60) == 2
    minute.fill(-100, 60)
    minute.fill(59, 60)
    assert minute.wait_s(60) == 0


def test_several_routers_say_that_limits_hold_for_each(path, caplog):
    add_key(path, name="alice", tokens_per_minute=10)
    config = ServeConfig(model="m", api_key_file=path, router_replicas=3)
    api_keys.ApiKeys(config, Metrics("m", Registry(1.0, 16)))
    assert "limits are those of each of the 3 routers" in caplog.text
