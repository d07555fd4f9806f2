"""Draft heads on rank 0 of several ranks with pools of their own: some drafts are right, tokens stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from protocol.speculation import Method, SpeculativeConfig
from tests.engine import parallel_child
from tests.engine.kernels import needs_kernel
from tests.engine.parallel_child import answer, in_child
from tests.speculation.methods import Given, requests


def tokens_of(results: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Return tokens alone: how many a step drafts depends on times."""
    return {name: [token for step in each[::2] for token in step] for name, each in results.items()}


CASES: list[tuple[Method, int]] = [("eagle", 2), ("eagle", 4), ("mtp", 2), ("medusa", 4), ("dflash", 2)]


@needs_kernel
@pytest.mark.parametrize(("method", "size"), CASES)
def test_heads_draft_on_rank_0(given: Given, method: Method, size: int) -> None:
    folder = {"eagle": given.head, "mtp": given.mtp, "medusa": given.medusa, "dflash": given.dflash}[method]
    asked = SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=4)
    config = msgspec.to_builtins(replace(given.config, dtype="bfloat16", speculative_config=asked))
    encoded = [msgspec.msgpack.encode(each) for each in requests("seeded", 16)]
    pipes = [in_child(parallel_child.run, config, each, "gloo", encoded) for each in (1, size)]
    (_, expected, _), (forward, results, _) = map(answer, pipes)
    assert forward.endswith(f"on {size} ranks")
    assert tokens_of(results) == tokens_of(expected)
    assert sum(accepted for each in results.values() for _, _, accepted in each[1::2]) > 0
