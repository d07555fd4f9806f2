"""The model to quantize, as its publisher stored it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from protocol.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
        folder = Path(model) if Path(model).is_dir() else _download(model)
        config = _read_json(folder / "config.json")
        if "quantization_config" in config:
            method = config["quantization_config"].get("quant_method")
            raise ConfigError(f"--model: {model} is quantized already ({method}); give the original model")
        return cls(folder, config, _shards(folder))

    @property
    def size(self) -> int:
        """The bytes of its weights."""
        return sum((self.folder / name).stat().st_size for name in self.shards)

    def has(self, tensor: str) -> bool:
        return any(tensor in names for names in self.shards.values())

    def copy_companions(self, folder: Path) -> None:
        """Copy the files of the tokenizer, the generation config and the like."""
        for pattern in _COPIED:
            for path in sorted(self.folder.glob(pattern)):
                if path.name not in _REWRITTEN:
                    shutil.copyfile(path, folder / path.name)


def _download(model: str) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", *_COPIED]))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model: cannot load {model!r}: {reason}") from error


def _shards(folder: Path) -> dict[str, tuple[str, ...]]:
    if (folder / INDEX).is_file():
        names: dict[str, list[str]] = {}
        for tensor, file in sorted(_read_json(folder / INDEX)["weight_map"].items()):
            names.setdefault(file, []).append(tensor)
        return {file: tuple(tensors) for file, tensors in names.items()}
    if (folder / SINGLE).is_file():
        return {SINGLE: _names(folder / SINGLE)}
    raise ConfigError(f"--model: {folder} has neither {SINGLE} nor {INDEX}")


def _names(path: Path) -> tuple[str, ...]:
    try:
        with safe_open(path, "pt") as file:
            return tuple(sorted(file.keys()))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--model: {path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {path} cannot be read: {error}") from error
    return content
