"""The choice of layers that a model skips when it drafts for itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from deploy.cli import app
from protocol.speculation import parse_speculative_config
from tests.speculation.tiny_trained import write_text
from training.layer_choice import search

IDLE = 2
"""The layer that adds nothing to the hidden states."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        idle = model.model.layers[IDLE]
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    return model


def test_a_layer_without_effect_is_skipped_first(model: PreTrainedModel) -> None:
    texts = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0))
    first, second = search(model, texts, 2)
    assert first.skipped == (IDLE,)
    assert first.agreement == 1.0
    assert first.speed_up > 1
    assert second.skipped[0] == IDLE and second.agreement < 0.9


def choose(folder: Path, tmp_path: Path, *options: str) -> Result:
    write_text(tmp_path / "texts")
    given = [
        "--model",
        str(folder),
        "--data",
        str(tmp_path / "texts"),
        "--output",
        str(tmp_path / "layers.json"),
    ]
    return CliRunner().invoke(app, ["speculate", "choose-layers", *given, *options])


def test_the_command_writes_a_speculative_config(folder: Path, tmp_path: Path) -> None:
    result = choose(folder, tmp_path, "--num-layers", "1", "--length", "64")
    assert result.exit_code == 0, result.output
    config = parse_speculative_config((tmp_path / "layers.json").read_text())
    assert config.method == "self_speculative"
    assert config.skip_layers in ([0], [1])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--num-layers", "2"), "--num-layers: must be below the model's 2 layers, got 2"),
        (("--length", "20000"), "--length: 20000 exceeds the"),
        (("--data", "nowhere"), "--data: nowhere does not exist"),
        (("--output", "no/such/folder"), "--output: no/such/folder cannot be written"),
    ],
)
def test_bad_input_is_named_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("training.layer_choice.load_frozen", None)
    result = choose(folder, tmp_path, *options)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
    assert not (tmp_path / "layers.json").exists()


def test_a_model_of_one_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 1}))
    result = choose(model, tmp_path)
    assert result.exit_code == 2
    assert "has one layer, without which it cannot draft" in " ".join(result.output.split())
