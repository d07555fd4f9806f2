from __future__ import annotations

import random

import pytest

from protocol.config import ServeConfig
from protocol.messages import PeerAddress, Register, WorkerState
from protocol.sampling import SamplingParams
from router.choice import Choice, Prompt
from router.journal import Generation, Journal
from router.metrics import Metrics
from router.placement.interface import Placement, RequestFacts, WorkerSnapshot
from router.placement.least_loaded import MIN_FETCHED_TOKENS, least_loaded
from router.placer import Placer
from router.prefixes import BLOCK_TOKENS, PrefixDirectory
from router.registry import Registry, WorkerKey

ONE, TWO = WorkerKey("prefill-0", "a"), WorkerKey("decode-0", "b")


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_the_longest_common_prefix_of_each_worker_is_found() -> None:
    directory = PrefixDirectory()
    directory.add(ONE, tokens(500)[:200], "")
    directory.add(TWO, tokens(500), "")
    asked = tokens(500)[:400] + tokens(100, seed=1)
    assert directory.find(asked, "") == {
        ONE: 200 // BLOCK_TOKENS * BLOCK_TOKENS,
        TWO: 400 // BLOCK_TOKENS * BLOCK_TOKENS,
    }
    assert directory.find(tokens(500, seed=2), "") == {}
    assert directory.find(asked, "tenant") == {}
    assert directory.find(asked[: BLOCK_TOKENS - 1], "") == {}


def test_a_gap_ends_a_workers_prefix() -> None:
    """The head was forgotten for lack of room: the tail alone is of no use."""
    directory = PrefixDirectory(max_blocks=4)
    long = tokens(4 * BLOCK_TOKENS)
    directory.add(ONE, long, "")
    assert directory.find(long, "")[ONE] == 4 * BLOCK_TOKENS
    directory.add(TWO, tokens(2 * BLOCK_TOKENS, seed=1), "")
    assert len(directory) == 4
    assert directory.find(long, "") == {ONE: 2 * BLOCK_TOKENS}


def placed(cached: dict[str, int]) -> Placement:
    workers = [
        WorkerSnapshot("p0", ("prefill",)),
        WorkerSnapshot("p1", ("prefill",), prefill_tokens=9),
        WorkerSnapshot("d0", ("decode",)),
    ]
    placement = least_loaded(RequestFacts(cached_tokens=cached), workers)
    assert isinstance(placement, Placement)
    return placement


def test_a_prefix_is_fetched_where_that_pays() -> None:
    assert placed({}).prefix is None
    assert placed({"d0": MIN_FETCHED_TOKENS}).prefix == "d0"
    assert placed({"d0": MIN_FETCHED_TOKENS - 1}).prefix is None
    assert placed({"d0": 300, "p1": 400}).prefix == "p1"
    assert placed({"d0": 300, "p0": 100}).prefix is None
    assert placed({"gone": 1000}).prefix is None


@pytest.mark.parametrize(("incarnation", "asked"), [("new", "decode-1"), ("old", None)])
def test_only_the_incarnation_that_computed_a_prefix_is_asked_for_it(
    incarnation: str, asked: str | None
) -> None:
    config, registry, sent = ServeConfig(), Registry(5.0), []
    metrics = Metrics("m", registry)
    placer = Placer(config, Journal(), registry, metrics, lambda _, m: not sent.append(m), least_loaded)
    for worker_id in ("decode-0", "decode-1"):
        address = PeerAddress(worker_id=worker_id, incarnation="new", control="tcp://x:1")
        state = WorkerState(worker_id=worker_id, incarnation="new", role="decode")
        facts = {"max_model_len": 1000, "vocab_size": 1000, "eos_token_ids": []}
        registry.register(Register(address=address, role="decode", model="m", state=state, **facts))
    prompt = tokens(500)
    placer.prefixes.add(WorkerKey("decode-1", incarnation), prompt, "")
    choice = Choice(0, Prompt(prompt), None)  # type: ignore[arg-type]
    generation = Generation([(choice, SamplingParams(max_tokens=1))], arrival=0.0, timeout_s=1.0)
    assert placer.place(generation.requests[0]) is None
    (message,) = sent
    assert message.incarnation == "new"
    assert (message.prefix.worker_id if message.prefix else None) == asked
