"""Models with unlike layers, shared KV, sinks or latents give `generate`'s tokens when a similar model
drafts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import write_model
from tests.speculation.small_engine import ask, prompt_of, run, small_config
from tests.worker.tiny_model import greedy, load

LENGTHS, NUM_TOKENS = [1, 20, 40, 100], 24


def make_engine(folder: Path, **speculation: Any) -> Engine:
    config = small_config(folder, 400)
    asked = SpeculativeConfig(**speculation)
    return Engine(replace(config, speculative_config=asked), speculate=BatchSpeculator)


def write_pair(model_type: str, folder: Path) -> tuple[Path, Path]:
    """Write a model and a similar one."""
    target, draft = folder / "target", folder / "draft"
    write_model(model_type, target)
    model = load(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(draft)
    return target, draft


@pytest.mark.parametrize(
    ("model_type", "is_tree"),
    [("gemma4_text", True), ("mimo_v2_flash", False), ("gpt_oss", True), ("deepseek_v3", False)],
)
def test_drafts_change_no_token(model_type: str, is_tree: bool, tmp_path: Path) -> None:
    target, draft = write_pair(model_type, tmp_path)
    shape = {"tree": True, "tree_nodes": 12} if is_tree else {}
    engine = make_engine(target, method="draft_model", model=str(draft), num_speculative_tokens=4, **shape)
    reference = load(target)
    prompts = [prompt_of(length, i) for i, length in enumerate(LENGTHS)]
    asked = [ask(f"r{i}", prompt, NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outputs = run(engine, asked)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    assert [outputs[request.request_id].token_ids for request in asked] == expected
    drafted, accepted = (
        sum(getattr(output, name) for output in outputs.values())
        for name in ("drafted_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted


def test_models_with_shared_kv_cannot_draft_with_some_layers(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path)
    with pytest.raises(ConfigError, match="skip_layers: gemma4_text has layers that share their KV"):
        make_engine(tmp_path, method="self_speculative", skip_layers=[1])
