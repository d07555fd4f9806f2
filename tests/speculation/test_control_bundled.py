"""The controller with the bundled pair drafts where drafts are accepted, and changes no token."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.speculation.engines import DRAFT, MODELS, TARGET, ask, finish, make_engine

NUM_TOKENS = 32

pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason="the bundled models are not there")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:3]
    return [tokenizer(json.loads(line)["prompt"]).input_ids[:64] for line in lines]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_choice_changes_a_token(prompts: list[list[int]], temperature: float) -> None:
    outputs = []
    for draft in (None, DRAFT):
        engine, _ = make_engine(TARGET, draft)
        for index, prompt in enumerate(prompts):
            engine.add(ask(f"r{index}", prompt, NUM_TOKENS, temperature))
        outputs.append(finish(engine))
    assert outputs[0] == outputs[1]
    choices = {name: count for name, count in engine.counters().items() if "choices" in name}
    assert sum(choices.values()) > 0
    state = engine.speculation()
    assert state is not None and state.methods[0].acceptance[0] > 0.4
