"""Loads the layers in `reference/`: one random layer in each layout, packed and dequantized by the library
that defines it (AutoAWQ 0.2.9, GPTQModel 7.7.0, compressed-tensors 0.20.0, Transformers' fine-grained FP8).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from engine.quantization.weight import StoredLayer

FOLDER = Path(__file__).parent / "reference"
NAMES = sorted(path.stem for path in FOLDER.iterdir())


def load_reference(name: str) -> tuple[dict[str, Any], StoredLayer, Tensor]:
    """Return the `quantization_config`, the layer, and its library's dequantized values."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    dequantized = tensors.pop("dequantized")
    stored = {key.removeprefix("layer."): tensor for key, tensor in tensors.items()}
    outputs, inputs = dequantized.shape
    return config, StoredLayer("layer", outputs, inputs, stored), dequantized
