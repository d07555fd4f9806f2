"""Models with unlike layers, shared KV, sinks or latents give `generate`'s tokens under drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.e2e.architectures import write_model
from tests.speculation.small_engine import (
    ask,
    drafted_and_accepted,
    drafting,
    prompt_of,
    run,
    small_config,
    write_noisy,
)
from tests.worker.tiny_model import assert_greedy, load

LENGTHS, NUM_TOKENS = [1, 20, 40, 100], 24


@pytest.mark.parametrize(
    ("model_type", "is_tree"), [("gemma4_text", True), ("gpt_oss", True), ("deepseek_v3", False)]
)
def test_drafts_change_no_token(model_type: str, is_tree: bool, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_model(model_type, target)
    write_noisy(target, draft, 0.01)
    shape = {"tree": True, "tree_nodes": 12} if is_tree else {}
    engine = drafting(
        small_config(target, 400), method="draft_model", model=str(draft), num_speculative_tokens=4, **shape
    )
    reference = load(target)
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate(LENGTHS)}
    found = run(engine, [ask(name, prompt, NUM_TOKENS, ignore_eos=True) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_greedy(reference, prompt, found[name].token_ids, NUM_TOKENS)
    drafted, accepted = drafted_and_accepted(found)
    assert 0 < accepted < drafted


def test_models_with_shared_kv_cannot_draft_with_some_layers(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path)
    with pytest.raises(ConfigError, match="skip_layers: gemma4_text has layers that share their KV"):
        drafting(small_config(tmp_path), method="self_speculative", skip_layers=[1])
