"""Writes LoRA adapters as PEFT does, and merges them into a model by PEFT's formula."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.lora.table import adaptable

PREFIX = "base_model.model."


def write_adapter(
    model: Path,
    folder: Path,
    seed: int,
    *,
    targets: tuple[str, ...] = ("",),
    rank: int = 4,
    strength: float = 0.4,
    dtype: torch.dtype = torch.float32,
    ranks: Callable[[str], int] | None = None,
    **fields: Any,
) -> Path:
    """Write random tensors for the linear layers whose paths end with one of `targets`, strong enough to
    change tokens.
    """
    base = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path, (outputs, inputs) in adaptable(base).items():
        if not path.endswith(targets):
            continue
        own = rank if ranks is None else ranks(path)
        down = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
        up = torch.randn(outputs, own, generator=generator) * strength
        tensors[f"{PREFIX}{path}.lora_A.weight"] = down.to(dtype)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = up.to(dtype)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    return write(folder, config | {"target_modules": list(targets), "use_dora": False} | fields, tensors)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


def merge(model: PreTrainedModel, folder: Path, scale: Callable[[str], float]) -> PreTrainedModel:
    """Return a model with W + B A * scale. `scale` depends on the layer's path."""
    _, tensors = read(folder)
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            path = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            layer = model.get_submodule(path)
            delta = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float() * scale(path)
            layer.weight += delta.T if isinstance(layer, Conv1D) else delta
    return model
