"""Checkpoints with parts for images or sound load only their language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from engine.linear.quantized import QuantizedLinear
from engine.load.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import UnsupportedModelError
from tests.docs.tiny_shapes import tiny_config
from tests.docs.verdicts import verdict
from tests.engine.quantization.quantized_model import write_quantized

TOKENS = torch.tensor([[5, 9, 250, 3, 77, 8]])


def write(folder: Path, model_type: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForMultimodalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def config_for(folder: Path) -> ServeConfig:
    return ServeConfig(model=str(folder), device="cpu", dtype="float32")


def logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("model_type", "served"),
    [
        ("llava", "LlamaForCausalLM"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        ("nemotron_h_omni", "NemotronHForCausalLM"),
    ],
)
def test_parts_beside_the_language_model_are_not_loaded(tmp_path: Path, model_type: str, served: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {model_type}")
    whole = write(tmp_path, model_type)
    loaded = load_model(config_for(tmp_path)).model
    assert type(loaded).__name__ == served
    language_model = whole.get_decoder()
    parts = {language_model, whole.get_output_embeddings()} - {None}
    assert loaded.num_parameters() == sum(weight.numel() for part in parts for weight in part.parameters())
    assert loaded.num_parameters() < whole.num_parameters() / 1.5
    if model_type == "nemotron_h_omni":
        whole = language_model  # its whole class does not run on text alone
    torch.testing.assert_close(logits(loaded), logits(whole))


@pytest.mark.parametrize("model_type", ["mistral3", "step3p7", "kimi_k25"])
def test_tokens_equal_the_whole_classs(model_type: str) -> None:
    found = verdict(model_type)
    assert found.kind == "served"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight: is missing"):
        load_model(config_for(tmp_path))


@pytest.mark.parametrize("prefixes", [("language_model.", "language_model."), ("model.language_", "")])
def test_quantized_layers_of_the_language_model_stay_quantized(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    """Checkpoints use older and newer names for them."""
    dense = write_quantized(tmp_path, "llama", "awq")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    model, head = prefixes
    renamed = {(head if name.startswith("lm_head") else model) + name: each for name, each in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.ones(4, 4)}, file, {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    method = fields.pop("quantization_config")
    whole = tiny_config("llava")
    whole.text_config = AutoConfig.for_model(**fields)
    (tmp_path / "config.json").write_text(json.dumps({**whole.to_dict(), "quantization_config": method}))
    loaded = load_model(config_for(tmp_path)).model
    assert sum(isinstance(module, QuantizedLinear) for module in loaded.modules()) == 2 * 7
    torch.testing.assert_close(logits(loaded), logits(dense))
