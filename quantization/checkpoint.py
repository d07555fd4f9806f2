"""Writes the quantized model: copies the source's files and replaces the linear layers' weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.quantization.checkpoint import Layout
from quantization.source import INDEX, Source
from quantization.unfinished import FinishedBlock

LoadBlock = Callable[[int], FinishedBlock]


def write(
    folder: Path,
    source: Source,
    layout: Layout,
    blocks: Mapping[str, int],
    load: LoadBlock,
    unquantized: Sequence[str],
) -> int:
    """Write one shard for each shard of the source. Returns the shards' bytes.

    `blocks` maps the prefix of a block's tensor names to the block's number. The linear layers `unquantized`
    are copied as they are. config.json is written last, so an incomplete folder cannot be loaded as a model.
    """
    cached = lru_cache(maxsize=1)(load)
    weight_map: dict[str, str] = {}
    for file, names in source.shards.items():
        tensors: dict[str, Tensor] = {}
        with safe_open(source.folder / file, "pt") as stored:
            for name in names:
                tensors |= dict(_converted(name, stored.get_tensor(name), layout, blocks, cached))
        weight_map |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    size = sum((folder / file).stat().st_size for file in source.shards)
    if len(source.shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    source.copy_companions(folder)
    _write_json(
        folder / "config.json", source.config | {"quantization_config": layout.config(list(unquantized))}
    )
    return size


def _converted(
    name: str, tensor: Tensor, layout: Layout, blocks: Mapping[str, int], load: LoadBlock
) -> Iterator[tuple[str, Tensor]]:
    prefix = next((prefix for prefix in blocks if name.startswith(prefix)), None)
    if prefix is None:
        yield name, tensor
        return
    block = load(blocks[prefix])
    inner = name.removeprefix(prefix)
    layer = inner.removesuffix(".weight")
    if inner.endswith(".weight") and layer in block.quantized:
        for suffix, value in layout.write(block.quantized[layer]).items():
            yield f"{prefix}{layer}.{suffix}", value
    else:
        yield name, block.changed.get(inner, tensor).to(tensor.dtype)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
