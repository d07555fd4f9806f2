"""The weights of drafters: published heads as config.json and files of tensors; rounding to fewer bits."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from checkpoints.drafts import refusal
from engine.devices.cuda.tiles import tile_on_gpu
from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault
from engine.linear.packed_quantized import dequantize_linears, pack_quantized_linears
from engine.linear.rounding import round_layers
from engine.quantization.weight import CodeFormat
from protocol.errors import ConfigError

_FLAG = "--speculative-config: model"
_WHOLE_MODEL = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


class Checkpoint:
    """`config` is config.json's content; `names` are the tensors', none of them read yet.

    Of safetensors files only the tensors asked for are read. Other files are unpickled with torch's
    restricted unpickler, which makes tensors and nothing else.
    """

    def __init__(self, model: str, files: Sequence[str] = (), revision: str | None = None) -> None:
        """`files` are looked for before those of a whole model. Raises `ConfigError` that names the file."""
        self.folder = _folder(model, files, revision)
        self.config = _read_json(self.folder / "config.json")
        if fault := refusal(self.config):
            raise ConfigError(f"{_FLAG}: {self.folder / 'config.json'}: {fault}")
        self._unpickled: dict[Path, dict[str, Tensor]] = {}
        self._files = self._find([*files, *_WHOLE_MODEL])

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        """Raises `ConfigError` when there is no such tensor, or its file is damaged."""
        if name not in self._files:
            raise ConfigError(f"{_FLAG}: {self.folder}: the tensor {name} is missing")
        path = self._files[name]
        if path.suffix != ".safetensors":
            return self._unpickle(path)[name]
        with _open_safetensors(path) as file:
            return file.get_tensor(name)

    def error(self, name: str, reason: str) -> ConfigError:
        """An error about a tensor, or about a field of config.json."""
        return ConfigError(f"{_FLAG}: {self._files.get(name, self.folder / 'config.json')}: {name} {reason}")

    def _find(self, candidates: Sequence[str]) -> dict[str, Path]:
        """The file of each tensor."""
        for path in (self.folder / candidate for candidate in candidates):
            if not path.exists():
                continue
            if path.suffix == ".json":
                weight_map = _read_json(path).get("weight_map", {})
                return {name: self.folder / file for name, file in weight_map.items()}
            if path.suffix == ".safetensors":
                with _open_safetensors(path) as file:
                    return dict.fromkeys(file.keys(), path)
            return dict.fromkeys(self._unpickle(path), path)
        raise ConfigError(f"{_FLAG}: {self.folder} has none of {', '.join(candidates)}")

    def _unpickle(self, path: Path) -> dict[str, Tensor]:
        if path not in self._unpickled:
            try:
                self._unpickled[path] = torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ConfigError(f"{_FLAG}: {path}: not a file of only tensors: {error}") from error
        return self._unpickled[path]


def _folder(model: str, files: Sequence[str], revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    patterns = ["config.json", *files, *_WHOLE_MODEL, "model-*.safetensors", "pytorch_model-*.bin"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_FLAG}: {model!r} is neither a folder nor an accessible repository: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: {path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{_FLAG}: {path}: must be a JSON object")
    return content


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{_FLAG}: {path}: cannot be read: {error}") from error


FIELD = "--speculative-config: quantization"


def round_draft(
    draft: nn.Module, format: CodeFormat, target: LoadedModel, kept: nn.Module | None = None
) -> None:
    """Round the linear layers, except the one to be `kept`, and prepare them for the target's device. Raises
    ConfigError where the format fits none of them.
    """
    try:
        round_layers(draft, format, kept)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    if kernel_fault(target.device, target.dtype) is None:
        pack_quantized_linears(draft)
    elif target.device.type == "cpu":
        dequantize_linears(draft, target.dtype)  # torch would do so in every step
    else:
        tile_on_gpu(draft, target.device, target.dtype)
