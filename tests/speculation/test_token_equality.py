"""With coupled verification no method changes a token. A new method needs a line in `METHODS`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.speculation.methods import CHUNK, CRAMPED, METHODS, ROOMY, Given, requests
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import drafted_and_accepted, run, tokens

CASES = [
    *((method, 5, "seeded", True) for method in METHODS),
    *((method, 8, "greedy", False) for method in METHODS if "tree" in method or method == "dflash"),
    *((method, 1, "seeded", False) for method in ("eagle", "scripted tree")),
    *((method, 1, "greedy", False) for method in ("draft_model tree", "lookahead")),
]


@pytest.mark.parametrize(("method", "num_tokens", "sampling", "cramped"), CASES)
def test_tokens_equal_those_without_speculation(
    given: Given, plain: dict[str, Answers], method: str, num_tokens: int, sampling: str, cramped: bool
) -> None:
    """First with an empty cache, then again with the prompts' blocks found there."""
    given = given.with_room(method, CRAMPED if cramped else ROOMY, max_num_batched_tokens=CHUNK)
    engine = METHODS[method](replace(given, answers=plain[sampling], num_tokens=num_tokens))
    for _ in range(2):
        hits, preemptions = engine.stats().prefix_hit_tokens, engine.stats().num_preemptions
        found = run(engine, requests(sampling))
        assert tokens(found) == plain[sampling]
        assert (engine.stats().num_preemptions > preemptions) == cramped
        assert drafted_and_accepted(found)[1] > 0
    assert engine.stats().prefix_hit_tokens > hits
