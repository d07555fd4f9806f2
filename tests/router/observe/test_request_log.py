"""Each ended request gets a log line with the ids that its client and its workers use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.router_clients import emitted, eventually, is_idle, lose, post


def of_requests(caplog: pytest.LogCaptureFixture, logger: str = "router.observe.timing") -> list[Any]:
    return [record for record in caplog.records if record.name == logger]


def test_a_request_that_finishes(make_router, caplog):
    router = make_router(enable_log_requests=True)
    router.add_worker()
    with caplog.at_level("INFO"):
        answer = post(router, max_tokens=7, n=2)
        eventually(lambda: is_idle(router))
    first, second = of_requests(caplog)
    assert first.request_id != second.request_id
    for record in (first, second):
        assert record.http_request_id == answer.headers["x-request-id"]
        assert record.finish_reason == "length" and record.timing["tokens"] == 7
        assert record.request_id in record.getMessage() and record.http_request_id in record.getMessage()


def test_a_request_that_fails(make_router, caplog):
    router = make_router(enable_log_requests=True, request_timeout=1.5)
    router.add_worker().stall_after = 2
    with caplog.at_level("INFO"):
        assert post(router, max_tokens=7).status_code == 504
    (record,) = of_requests(caplog)
    assert (record.status, record.code, record.tokens) == (504, "timeout", 2)
    assert "took longer than 1.5 s" in record.getMessage()


def test_nothing_is_logged_by_default(make_router, caplog):
    router = make_router()
    router.add_worker()
    with caplog.at_level("INFO"):
        post(router)
    assert of_requests(caplog) == []


def test_a_request_that_is_placed_again_has_new_and_old_ids(make_router, caplog, pool):
    router = make_router(enable_log_requests=True)
    first = router.add_worker("decode-0", cached_tokens=5)
    first.stall_after = 2
    with caplog.at_level("INFO"):
        future = pool.submit(post, router)
        eventually(lambda: emitted(router) == [2])
        router.add_worker("decode-1")
        lose(router, first)
        answer = future.result(20)
    (moved,) = of_requests(caplog, "router.dispatch.dispatcher")
    (ended,) = of_requests(caplog)
    assert moved.http_request_id == ended.http_request_id == answer.headers["x-request-id"]
    assert moved.request_id == ended.request_id != ""
