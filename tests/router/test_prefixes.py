from __future__ import annotations

import random

from router.placement.interface import Placement, RequestFacts, WorkerSnapshot
from router.placement.least_loaded import MIN_FETCHED_TOKENS, least_loaded
from router.prefixes import BLOCK_TOKENS, PrefixDirectory
from router.registry import WorkerKey

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
