"""Writes Medusa heads in the published layouts, and computes them plainly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class PlainHeads:
    """Random heads: `layers[h][j]` is (weight, bias or None), `lm_heads[h]` is [rows, hidden_size]."""

    layers: list[list[tuple[Tensor, Tensor | None]]]
    lm_heads: list[Tensor]
    token_map: Tensor | None = None
    vocab_size: int = field(default=0)

    def logits(self, features: Tensor) -> Tensor:
        """Return [batch, heads, vocab_size] from [batch, hidden_size], one head after the other."""
        found = []
        for layers, lm_head in zip(self.layers, self.lm_heads, strict=True):
            x = features
            for weight, bias in layers:
                product = x @ weight.T + (0 if bias is None else bias)
                x = x + product * torch.sigmoid(product)
            logits = x @ lm_head.T
            if self.token_map is not None:
                full = torch.full((len(features), self.vocab_size), -torch.inf)
                for row, token in enumerate(self.token_map.tolist()):
                    full[:, token] = logits[:, row]
                logits = full
            found.append(logits)
        return torch.stack(found, dim=1)


def random_heads(
    num_heads: int, num_layers: int, hidden_size: int, vocab_size: int, bias: bool = True
) -> PlainHeads:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * hidden_size**-0.5

    layers = [
        [(normal(hidden_size, hidden_size), normal(hidden_size) if bias else None) for _ in range(num_layers)]
        for _ in range(num_heads)
    ]
    lm_heads = [normal(vocab_size, hidden_size) for _ in range(num_heads)]
    return PlainHeads(layers, lm_heads, vocab_size=vocab_size)


def own_names(heads: PlainHeads) -> dict[str, Tensor]:
    """Name the tensors as Medusa does: a sequence of residual blocks, then a linear layer."""
    tensors = {}
    for head, (layers, lm_head) in enumerate(zip(heads.layers, heads.lm_heads, strict=True)):
        for layer, (weight, bias) in enumerate(layers):
            assert bias is not None
            tensors[f"{head}.{layer}.linear.weight"] = weight
            tensors[f"{head}.{layer}.linear.bias"] = bias
        tensors[f"{head}.{len(layers)}.weight"] = lm_head
    return tensors


def vllm_names(heads: PlainHeads) -> dict[str, Tensor]:
    tensors = {}
    for head, (layers, lm_head) in enumerate(zip(heads.layers, heads.lm_heads, strict=True)):
        for layer, (weight, bias) in enumerate(layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = weight
            if bias is not None:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = bias
        tensors[f"lm_heads.{head}.weight"] = lm_head
    return tensors


def write_config(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def write_v1(folder: Path, tensors: dict[str, Tensor], suffix: str = ".pt", **config: Any) -> None:
    """Write a folder like the published v1 repositories, whose config.json always says 2 heads."""
    fields = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    write_config(folder, **(fields | config))
    if suffix == ".pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")


def write_vllm(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    write_config(folder, model_type="medusa", architectures=["MedusaModel"], **config)
    save_file(tensors, folder / "model.safetensors")
