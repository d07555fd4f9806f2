"""Training of MTP heads: serving loads them, and drafts what training unrolled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from protocol.errors import ConfigError
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.speculation.eagle_engine import Watched
from tests.training.recorded import continued, hidden_states
from training.heads.contract import HeadOptions, Target
from training.heads.mtp import build_mtp


def target_of(folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Target("tiny", model, torch.arange(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_5_text", "mtp.fc"), ("llama", "mtp_layers.0.input_proj")]
)
def test_serving_drafts_the_same_as_training(model_type: str, name: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "target")
    target = target_of(tmp_path / "target")
    torch.manual_seed(0)
    head = build_mtp(target, HeadOptions(depth=3))
    for parameter in head.module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head.save(tmp_path / "head")
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        assert f"{name}.weight" in file.keys()  # noqa: SIM118
    watched = Watched(tmp_path / "target", tmp_path / "head", num_tokens=3, method="mtp")
    watched.ask("a", [5, 17, 99, 3, 42, 8, 20, 33, 7, 61, 2], 10)
    watched.run()
    checked = 0
    for _, token_ids, drafted in watched.drafts:
        if len(drafted) == head.depth:
            ids = torch.tensor([token_ids])
            hidden = hidden_states(target, ids, head.hidden_layers)
            chain = head.draft(ids, hidden, torch.tensor([len(token_ids) - 2]))
            assert chain[0, 0].tolist() == drafted
            checked += 1
    assert checked > 3


def test_a_head_learns(tmp_path: Path) -> None:
    write_model("qwen3_5_text", tmp_path)
    target = target_of(tmp_path)
    torch.manual_seed(0)
    head = build_mtp(target, HeadOptions(depth=2))
    prompts = torch.randint(1, VOCAB_SIZE, (4, 4), generator=torch.Generator().manual_seed(1))
    token_ids = continued(target, prompts, 20)
    hidden = hidden_states(target, token_ids, head.hidden_layers)
    optimizer = torch.optim.AdamW(head.module.parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = head.loss(token_ids, hidden)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="--num-layers: an MTP head has one, got 2"):
        build_mtp(target_of(tmp_path), HeadOptions(num_layers=2))
