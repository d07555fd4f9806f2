"""Refused requests of operators change nothing."""

from __future__ import annotations

import pytest

from router.scaling.interface import ScaleAnswer
from router.scaling.scaler import least_worth
from tests.router.router_clients import eventually, make_pair, post

KEY = {"authorization": "Bearer second"}


@pytest.fixture
def router(make_router):
    router = make_router(api_key="first,second", drain_timeout=60.0)
    router.http.headers.update(KEY)
    return router


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "reason"),
    [
        ("/workers/decode-0/drain", {}, {"authorization": "Bearer third"}, 401, "API key"),
        ("/workers/prefill-0/role", {"role": "decode"}, {"authorization": ""}, 401, "API key"),
        ("/workers/decode-1/drain", {}, {}, 404, "there are decode-0, prefill-0"),
        ("/workers/decode-1/role", {"role": "prefill"}, {}, 404, "there are decode-0, prefill-0"),
        ("/workers/decode-0/drain", {}, {}, 409, "it is the last decode worker"),
        ("/workers/decode-0/role", {"role": "prefill"}, {}, 409, "it is the last decode worker"),
        ("/workers/decode-0/role", {"role": "decode"}, {}, 409, "is a decode worker already"),
        ("/workers/prefill-0/role", {"role": "cook"}, {}, 400, "role"),
        ("/workers/prefill-0/role", {}, {}, 400, "role"),
        ("/workers/prefill-0/drain", {"now": True}, {}, 400, "now"),
    ],
)
def test_refusals_change_nothing(router, path, body, headers, status, reason):
    told = []
    router.server.on_leave(lambda *asked: str(told.append(asked)), lambda *renewed: told.append(renewed))
    prefill, decode = make_pair(router)
    answer = router.http.post(path, json=body, headers={**KEY, **headers})
    assert (answer.status_code, reason in answer.text) == (status, True), answer.text
    workers = router.http.get("/workers").json()["workers"]
    assert {worker["id"]: worker["lifecycle"] for worker in workers} == {
        "decode-0": "ready",
        "prefill-0": "ready",
    }
    assert told == []
    assert post(router, max_tokens=3).status_code == 200
    assert (len(prefill.generated), len(decode.aborted)) == (1, 0)


def test_without_any_worker_every_name_is_unknown(router):
    answer = router.http.post("/workers/decode-0/drain", json={})
    assert (answer.status_code, "there is none" in answer.text) == (404, True)


def test_a_worker_that_changes_its_role_is_not_drained(router, pool):
    """Otherwise its operator would wait in vain for it to leave."""
    decodes = {f"decode-{index}": router.add_worker(f"decode-{index}") for index in range(2)}
    prefill = router.add_worker("prefill-0", "prefill", peers=decodes)
    prefill.hold.set()
    pool.submit(post, router, max_tokens=3)
    eventually(lambda: prefill.generated)
    pool.submit(router.http.post, "/workers/prefill-0/role", json={"role": "decode"})
    eventually(lambda: router.server.state.registry.named("prefill-0").draining)
    answer = router.http.post("/workers/prefill-0/drain", json={})
    assert (answer.status_code, "changes its role" in answer.text) == (409, True)
    prefill.hold.clear()


def test_an_impossible_number_of_workers_changes_nothing(router):
    """The launcher refuses it, or there is no launcher."""
    make_pair(router)
    for body, status, reason in (
        ({"decode": 2}, 409, "decode: these workers were not started by a launcher"),
        ({"decode": "two"}, 400, "decode: expected int"),
        ({"decode": -1}, 400, "decode: must be from 0 to 4096, got -1"),
        ({"decode": 5000}, 400, "decode: must be from 0 to 4096, got 5000"),
        ({"cook": 1}, 400, "cook"),
        ({}, 400, "name one role at least: prefill, decode, draft"),
    ):
        answer = router.http.post("/scale", json=body)
        assert (answer.status_code, reason in answer.text) == (status, True), answer.text
    assert router.http.post("/scale", json={"decode": 2}, headers={"authorization": ""}).status_code == 401


def test_a_worker_that_cannot_be_started_is_reported_and_the_others_continue(router, pool):
    decode = router.add_worker("decode-0")
    eventually(lambda: len(router.server.state.registry.live()) == 1)

    def scale(request):
        assert (request.targets, request.worth) == ({"decode": 3}, ["decode-0"])
        pool.submit(router.add_worker, "decode-1")
        pool.submit(router.server.gave_up, "decode-2", "there is no room for decode-2")
        return ScaleAnswer(started=["decode-1", "decode-2"])

    router.server.on_scale(scale)
    answer = router.http.post("/scale", json={"decode": 3})
    assert answer.status_code == 503
    assert "decode-2: there is no room for decode-2. What runs goes on: 2 decode" in answer.text
    assert post(router, max_tokens=3).status_code == 200 and decode is not None


def test_the_least_valuable_workers_are_listed_first(router, pool):
    """They have the fewest requests, and of these are the youngest."""
    workers = [router.add_worker(f"decode-{index}") for index in range(3)]
    eventually(lambda: len(router.server.state.registry.live()) == 3)
    for worker in workers:
        worker.hold.set()
    pool.submit(post, router, max_tokens=3)
    eventually(lambda: any(worker.generated for worker in workers))
    (busy,) = [worker.worker_id for worker in workers if worker.generated]
    registry = router.server.state.registry
    ages = {worker.key.worker_id: worker.since for worker in registry}
    idle = sorted(ages.keys() - {busy}, key=lambda name: -ages[name])
    assert [worker.key.worker_id for worker in least_worth(registry)] == [*idle, busy]
    for worker in workers:
        worker.hold.clear()
