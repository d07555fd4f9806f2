"""An assignment passes its stages in order, and its load counts once at each worker."""

from __future__ import annotations

import pytest

from router.workers.assignment import Loads, Stage
from router.workers.registry import Registry, Worker
from tests.router.placed import registration


def start(registry: Registry, worker_id: str) -> Worker:
    role, incarnation = worker_id.partition("-")[0], f"{worker_id}-1"
    worker = registry.register(registration(worker_id, incarnation, role))
    assert worker is not None
    return worker


@pytest.fixture
def registry() -> Registry:
    return Registry(worker_timeout=1.0)


def counts(*workers: Worker) -> list[tuple[int, int, int]]:
    return [(w.outstanding_requests, w.outstanding_prompts, w.outstanding_rows) for w in workers]


def test_a_split_request(registry):
    loads, prefill, decode = Loads(registry), start(registry, "prefill-0"), start(registry, "decode-0")
    at = loads.assign(prefill, decode, num_tokens=50, num_uncached=40)
    assert (at.stage, at.stage.shown, at.holders) == (Stage.HELD, "queue", [prefill, decode])
    assert not at.is_sent_to(prefill), "it has not left the router"
    loads.sent(at)
    assert (at.stage.shown, at.waits_at, at.worker, at.answered_by) == ("prefill", prefill, prefill, None)
    assert counts(prefill, decode) == [(1, 1, 0), (1, 0, 1)]
    loads.answered(at)
    assert (at.stage, at.stage.shown, at.answered_by) == (Stage.TRANSFER, "transfer", prefill)
    loads.handed_over(at)
    assert (at.stage.shown, at.holders, at.worker, at.answered_by) == ("transfer", [decode], decode, prefill)
    loads.taken_over(at)
    assert (at.stage.shown, at.answered_by, at.is_sent_to(prefill)) == ("decode", decode, False)
    assert counts(prefill, decode) == [(0, 0, 0), (1, 0, 1)]
    loads.release(at)
    loads.release(at)
    assert (at.stage.shown, at.holders, at.is_sent_to(decode)) == ("queue", [], False)
    assert counts(prefill, decode) == [(0, 0, 0), (0, 0, 0)]
    assert at.worker_ids == {"prefill": "prefill-0", "decode": "decode-0"}, "it can still be told"


@pytest.mark.parametrize("has_answered", [False, True])
def test_the_prefill_worker_finally_decodes(registry, has_answered):
    loads, prefill = Loads(registry), start(registry, "prefill-0")
    decodes = [start(registry, f"decode-{number}") for number in range(2)]
    at = loads.assign(prefill, decodes[0], num_tokens=50, num_uncached=40)
    loads.sent(at)
    if has_answered:
        loads.answered(at)
    loads.redirect(at, decodes[1])
    assert (at.decode, counts(*decodes)) == (decodes[1], [(0, 0, 0), (1, 0, 1)])
    assert (prefill.load.computed_prompts, prefill.load.computed_tokens) == (1, 40)
    loads.redirect(at, prefill)
    assert at.stage is (Stage.DECODE if has_answered else Stage.PREFILL)
    assert (at.prefill, at.holders, at.worker_ids) == (None, [prefill], {"decode": "prefill-0"})
    assert counts(prefill, *decodes) == [(1, int(not has_answered), 1), (0, 0, 0), (0, 0, 0)]
    loads.release(at)
    assert counts(prefill) == [(0, 0, 0)]
    assert prefill.outstanding_context == 0
    assert (prefill.load.computed_prompts, prefill.load.computed_tokens) == (0, 0)


def test_no_stage_is_skipped(registry):
    loads, worker = Loads(registry), start(registry, "decode-0")
    at = loads.assign(worker, worker, num_tokens=50, num_uncached=40)
    with pytest.raises(AssertionError, match="HELD -> DECODE"):
        loads.answered(at)
    assert (at.stage, counts(worker)) == (Stage.HELD, [(1, 1, 1)])
