"""Draft workers change how fast tokens come, never which."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.speculation.small_engine import ask, prompt_of, write_pair
from tests.worker.draft_network import (
    DecodeSide,
    DraftSide,
    Network,
    plain_tokens,
    remote_plan,
)

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    write_pair(target, draft)
    return target, draft


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 3}, {}])
@pytest.mark.parametrize("jitter", [False, True])
def test_two_decode_workers_share_a_draft_worker(pair: Pair, options: dict[str, int], jitter: bool) -> None:
    target, draft = pair
    decodes = [DecodeSide(name, target, draft, **options) for name in "ab"]
    drafter = DraftSide(draft)
    network = Network(decodes, [drafter], random.Random(1) if jitter else None, 3 if jitter else 0)
    asked = [
        [ask(f"{side}{i}", prompt_of(20 + 7 * i, i), 40, temperature=0.8 * (i % 2), seed=i) for i in range(3)]
        for side in range(2)
    ]
    for decode, requests in zip(decodes, asked, strict=True):
        for request in requests:
            decode.generate(request, remote_plan())
    network.run()
    for decode, requests in zip(decodes, asked, strict=True):
        assert decode.tokens() == plain_tokens(target, requests)
    network.settle()
    assert len(drafter.loop.requests) == 0
    assert sum(drafter.engine.blocks.available) == drafter.engine.blocks.num_blocks
