"""Rounds the matrices of a draft head to 8 bits, stored as compressed-tensors: fewer bytes to read."""

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from engine.linear.quantized import round_to_nearest
from engine.quantization.formats import Scheme
from engine.quantization.layout import Layout
from engine.quantization.weight import CodeFormat

GROUP = 128
"""Number of inputs that share a scale."""


def round_head(folder: Path) -> None:
    """Rewrite the head's config.json and its tensors."""
    path = folder / "config.json"
    config, tensors = json.loads(path.read_text()), load_file(folder / "model.safetensors")
    layout = Layout.of(Scheme("int-quantized", group_size=GROUP))
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        layer = name.removesuffix(".weight")
        rounded = round_to_nearest(tensors.pop(name), CodeFormat.INT8, GROUP)
        tensors |= {f"{layer}.{part}": tensor for part, tensor in layout.write(rounded).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config | {"quantization_config": layout.config([])}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    round_head(parser.parse_args().folder)
