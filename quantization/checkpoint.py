"""Checkpoints that `tandem quantize` reads and writes: the published source; the unfinished run in the output
folder, which the same command resumes; and the finished folder with quantized linear layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from checkpoints.source import folder_of, open_tensors, read_object
from engine.load.quantized_checkpoint import weight_files
from engine.quantization.layout import Layout
from engine.quantization.weight import CodeFormat, QuantizedWeight
from protocol.errors import ConfigError
from training.loop import check_same_run
from training.output import make_folder, save_tensors, write_json

FOLDER = "unfinished"
_SETTINGS = "settings.json"
_PARTS = ("codes", "scales", "zeros", "permutation")


@dataclass(frozen=True)
class FinishedBlock:
    """A finished block: its quantized layers, and all other tensors that changed, by their names in it."""

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
    """An unfinished run in `output`, opened or begun with `settings`. Raises `ConfigError` if `output` has a
    run with other settings.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self._folder = output / FOLDER
        if (self._folder / _SETTINGS).exists():
            begun = json.loads((self._folder / _SETTINGS).read_text(encoding="utf-8"))
            check_same_run(self._folder, begun, settings)
            return
        make_folder(self._folder)
        write_json(self._folder / _SETTINGS, settings)

    def has(self, index: int) -> bool:
        return self._path(index).exists()

    def save(self, index: int, block: FinishedBlock) -> None:
        tensors = {f"changed/{name}": tensor for name, tensor in block.changed.items()}
        for name, weight in block.quantized.items():
            parts = {part: getattr(weight, part) for part in _PARTS}
            tensors |= {f"{name}/{part}": value for part, value in parts.items() if value is not None}
        formats = {name: weight.format.value for name, weight in block.quantized.items()}
        contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(self._path(index), contiguous, formats)

    def load(self, index: int) -> FinishedBlock:
        """Read a finished block. Raises `ConfigError` if its file is damaged."""
        with open_tensors(self._path(index), "--output") as file:
            formats = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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


LoadBlock = Callable[[int], FinishedBlock]


def write(
    folder: Path,
    source: Source,
    layout: Layout,
    blocks: Mapping[str, int],
    load: LoadBlock,
    unquantized: Sequence[str],
) -> int:
    """Write one shard for each shard of the source. Return the shards' size in bytes.

    `blocks` maps the prefix of a block's tensor names to the block's number. The linear layers `unquantized`
    are copied unchanged. config.json is written last, so an incomplete folder cannot be loaded as a model.
    """
    cached = lru_cache(maxsize=1)(load)
    weight_map: dict[str, str] = {}
    for file, names in source.shards.items():
        tensors: dict[str, Tensor] = {}
        with safe_open(source.folder / file, "pt") as stored:
            for name in names:
                tensors |= dict(_converted(name, stored.get_tensor(name), layout, blocks, cached))
        weight_map |= dict.fromkeys(tensors, file)
        save_tensors(folder / file, tensors, {"format": "pt"})
    size = sum((folder / file).stat().st_size for file in source.shards)
    if len(source.shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    source.copy_companions(folder)
    write_json(
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


INDEX = "model.safetensors.index.json"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_REWRITTEN = ("config.json", INDEX)


@dataclass(frozen=True)
class Source:
    """A model's folder. `shards` maps the name of each safetensors file to the names of its tensors."""

    folder: Path
    config: dict[str, Any]
    shards: Mapping[str, tuple[str, ...]]

    @classmethod
    def open(cls, model: str) -> Source:
        """Open a local folder, or download a hub id. Raises `ConfigError`."""
        folder = folder_of(model, "--model", ["*.safetensors", *_COPIED])
        config = read_object(folder / "config.json", "--model")
        if "quantization_config" in config:
            method = config["quantization_config"].get("quant_method")
            raise ConfigError(f"--model: {model} is quantized already ({method}); give the original model")
        return cls(folder, config, {path.name: _names(path) for path in weight_files(str(folder), None)})

    @property
    def size(self) -> int:
        """Size of the weights in bytes."""
        return sum((self.folder / name).stat().st_size for name in self.shards)

    def has(self, tensor: str) -> bool:
        return any(tensor in names for names in self.shards.values())

    def copy_companions(self, folder: Path) -> None:
        """Copy the files of the tokenizer, the generation config and the like."""
        for pattern in _COPIED:
            for path in sorted(self.folder.glob(pattern)):
                if path.name not in _REWRITTEN:
                    shutil.copyfile(path, folder / path.name)


def _names(path: Path) -> tuple[str, ...]:
    with open_tensors(path, "--model") as file:
        return tuple(sorted(file.keys()))
