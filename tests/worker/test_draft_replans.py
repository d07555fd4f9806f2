"""Plans that change in mid-request change how fast tokens come, never which."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from protocol.requests import DraftPlan
from tests.speculation.small_engine import ask, prompt_of, write_pair
from tests.worker.draft_network import DecodeSide, DraftSide, Network, plain_tokens, remote_plan
from tests.worker.light_loop import address

OTHER = address("draft-1", "e" * 16)
NOBODY = DraftPlan()
HERE = DraftPlan(method="draft_model", max_tokens=4)
PLANS = [None, NOBODY, HERE, remote_plan(), remote_plan(max_tokens=1), remote_plan(OTHER)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    write_pair(target, draft)
    return target, draft


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_tokens_are_the_same_through_any_change_of_plan(pair: tuple[Path, Path], loss: float) -> None:
    """And nothing stays at a draft worker, whatever messages come late, twice or never."""
    target, draft = pair
    rng = random.Random(11)
    decode = DecodeSide("a", target, draft, num_speculative_tokens=3)
    drafters = [DraftSide(draft), DraftSide(draft, OTHER)]
    network = Network([decode], drafters, random.Random(2), delay=1, loss=loss)
    requests = [
        ask(f"r{i}", prompt_of(15 + 9 * i, i), 40, temperature=0.9 * (i % 2), seed=i) for i in range(3)
    ]
    for request in requests:
        decode.generate(request, rng.choice(PLANS))
    changes = 0
    while decode.engine.has_work():
        network.turn()
        for request in requests:
            if rng.random() < 0.25:
                decode.loop.replan(request.request_id, rng.choice(PLANS))
                changes += 1
        assert changes < 1000, "it does not end"
    assert decode.tokens() == plain_tokens(target, requests)
    assert changes > 20
    accepted = 'spec_decode_num_accepted_tokens_total{{method="{}"}}'
    counters = decode.engine.counters()
    assert counters.get(accepted.format("remote"), 0) > 0
    assert counters.get(accepted.format("draft_model"), 0) > 0
    network.settle()
    for drafter in drafters:
        assert len(drafter.loop.requests) == 0
        assert sum(drafter.engine.blocks.available) == drafter.engine.blocks.num_blocks


def test_a_request_may_be_told_twice_to_draft_nowhere(pair: tuple[Path, Path]) -> None:
    """Beside one that drafts a fixed number of tokens."""
    target, draft = pair
    decode = DecodeSide("a", target, draft, num_speculative_tokens=3)
    requests = [ask("r", prompt_of(15, 0), 20), ask("s", prompt_of(15, 1), 20)]
    decode.generate(requests[0], DraftPlan())
    decode.generate(requests[1], DraftPlan(method="draft_model"))
    for _ in range(4):
        decode.step()
    decode.loop.replan("r", DraftPlan())
    while decode.engine.has_work():
        decode.step()
    assert decode.tokens() == plain_tokens(target, requests)
