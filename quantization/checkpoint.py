"""Stores an unfinished quantization within the output, from where the same command continues, and writes the
finished checkpoint: the source's files with quantized weights of the linear layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.quantization.checkpoint import Layout
from engine.quantization.weight import CodeFormat, QuantizedWeight
from protocol.errors import ConfigError
from quantization.source import INDEX, Source

FOLDER = "unfinished"
_SETTINGS = "settings.json"
_PARTS = ("codes", "scales", "zeros", "permutation")


@dataclass(frozen=True)
class FinishedBlock:
    """A finished block. `quantized` has its quantized layers by name; `changed` has all other tensors that
    the quantization changed, by their names in the block.
    """

    quantized: dict[str, QuantizedWeight]
    changed: dict[str, Tensor]


def check_output(output: Path) -> None:
    """Raise `ConfigError` if the folder holds anything other than an unfinished run."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: {output} is a file")
    if (output / FOLDER / _SETTINGS).exists() or not output.exists():
        return
    found = sorted(path.name for path in output.iterdir() if path.name != FOLDER)
    if found:
        raise ConfigError(f"--output: {output} has other files already ({found[0]}); choose another folder")


class Unfinished:
    """Opens or begins the run with `settings` in `output`. Raises `ConfigError` if there is a run with other
    settings.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self._folder = output / FOLDER
        if (self._folder / _SETTINGS).exists():
            self._check_same(settings)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.note(_SETTINGS, settings)

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        partial = self._folder / f"{name}.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._folder / name)

    def noted(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def has(self, index: int) -> bool:
        return self._path(index).exists()

    def save(self, index: int, block: FinishedBlock) -> None:
        tensors = {f"changed/{name}": tensor for name, tensor in block.changed.items()}
        for name, weight in block.quantized.items():
            parts = {part: getattr(weight, part) for part in _PARTS}
            tensors |= {f"{name}/{part}": value for part, value in parts.items() if value is not None}
        formats = {name: weight.format.value for name, weight in block.quantized.items()}
        partial = self._path(index).with_suffix(".partial")
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata=formats
        )
        partial.replace(self._path(index))

    def load(self, index: int) -> FinishedBlock:
        """Read a finished block. Raises `ConfigError` if its file is damaged."""
        try:
            with safe_open(self._path(index), "pt") as file:
                formats = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--output: {self._path(index)} cannot be read: {error}") from error
        changed = {
            name.removeprefix("changed/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("changed/")
        }
        quantized = {
            name: QuantizedWeight(CodeFormat(kind), *(tensors.get(f"{name}/{part}") for part in _PARTS))
            for name, kind in formats.items()
        }
        return FinishedBlock(quantized, changed)

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def _path(self, index: int) -> Path:
        return self._folder / f"block-{index:05}.safetensors"

    def _check_same(self, settings: Mapping[str, Any]) -> None:
        before = self.noted(_SETTINGS) or {}
        for name, now in settings.items():
            if before.get(name) != now:
                raise ConfigError(
                    f"--output: {self._folder} is of a run with {name} {before.get(name)!r}, this has "
                    f"{now!r}: give the same options to go on with it, or another --output"
                )


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
