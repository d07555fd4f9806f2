"""The weights of drafters: published heads (config.json and tensor files), and rounding to fewer bits."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.source import folder_of, open_tensors, read_object, refusal
from engine.devices.cuda.tiles import tile_on_gpu
from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault, linear_of
from engine.linear.packed_quantized import dequantize_linears, pack_quantized_linears, with_outputs
from engine.load.rounding import round_layers
from engine.model.describe import ACTIVATIONS
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
    """A drafter's files. `config` is the content of config.json; `names` are the names of the tensors.

    Only requested tensors are read from safetensors files. Other files are unpickled with torch's restricted
    unpickler, which creates nothing but tensors.
    """

    def __init__(self, model: str, files: Sequence[str] = (), revision: str | None = None) -> None:
        """Find the files: `files` before those of a whole model. Raise `ConfigError` that names the file."""
        patterns = ["config.json", *files, *_WHOLE_MODEL, "model-*.safetensors", "pytorch_model-*.bin"]
        self.folder = folder_of(model, _FLAG, patterns, revision)
        self.config = read_object(self.folder / "config.json", _FLAG)
        if fault := refusal(self.config):
            raise ConfigError(f"{_FLAG}: {self.folder / 'config.json'}: {fault}")
        self._unpickled: dict[Path, dict[str, Tensor]] = {}
        self._files = self._find([*files, *_WHOLE_MODEL])

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor. Raise `ConfigError` if it is missing or its file is damaged."""
        if name not in self._files:
            raise ConfigError(f"{_FLAG}: {self.folder}: the tensor {name} is missing")
        path = self._files[name]
        if path.suffix != ".safetensors":
            return self._unpickle(path)[name]
        with open_tensors(path, _FLAG) as file:
            return file.get_tensor(name)

    def error(self, name: str, reason: str) -> ConfigError:
        """Return an error about a tensor, or about a field of config.json."""
        return ConfigError(f"{_FLAG}: {self._files.get(name, self.folder / 'config.json')}: {name} {reason}")

    def _find(self, candidates: Sequence[str]) -> dict[str, Path]:
        for path in (self.folder / candidate for candidate in candidates):
            if not path.exists():
                continue
            if path.suffix == ".json":
                weight_map = read_object(path, _FLAG).get("weight_map", {})
                return {name: self.folder / file for name, file in weight_map.items()}
            if path.suffix == ".safetensors":
                with open_tensors(path, _FLAG) as file:
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


FIELD = "--speculative-config: quantization"


def round_draft(
    draft: nn.Module, format: CodeFormat, target: LoadedModel, kept: nn.Module | None = None
) -> None:
    """Round the linear layers, except `kept`. Raise ConfigError if the format fits none of them."""
    try:
        round_layers(draft, format, kept)
    except ValueError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    if kernel_fault(target.device, target.dtype) is None:
        pack_quantized_linears(draft)
    elif target.device.type == "cpu":
        dequantize_linears(draft, target.dtype)  # otherwise torch would do so in every step
    else:
        tile_on_gpu(draft, target.device, target.dtype)


EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
TABLES = (EMBEDDING, LM_HEAD, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors outside the layers. `t2d` follows from `d2t`; the verifier's are the target's own."""


def read_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the tensors of a module with the state `expected`. `names` has the file's names by the module's.
    Raise ConfigError for a tensor that is missing, has another shape or is no part of the module.
    """
    for ours in expected.keys() - names.keys():
        raise checkpoint.error(ours, "is missing")
    for ours, name in names.items():
        if ours not in expected:
            raise checkpoint.error(name, "is no part of the draft that config.json describes")
    tensors = {ours: checkpoint.tensor(name) for ours, name in names.items()}
    for ours, tensor in tensors.items():
        check_shape(checkpoint, names[ours], tensor, expected[ours].shape)
    return tensors


def check_shape(checkpoint: Checkpoint, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise checkpoint.error(name, f"has the shape {list(tensor.shape)}, not {list(expected)}")


def own_table(
    checkpoint: Checkpoint, name: str, rows: int, hidden_size: int, target: LoadedModel
) -> Tensor | None:
    """Return the file's embedding or LM head; None if it is the target's."""
    theirs = target.model.get_input_embeddings().weight
    if name not in checkpoint.names:
        if theirs.shape[1] != hidden_size:
            raise checkpoint.error(
                name, f"is missing, and the model's does not fit: {theirs.shape[1]} wide, not {hidden_size}"
            )
        return None
    tensor = checkpoint.tensor(name).to(target.device, target.dtype)
    if tensor.ndim == 2 and tensor.shape[0] > rows:
        tensor = tensor[:rows]  # padding
    check_shape(checkpoint, name, tensor, (rows, hidden_size))
    return None if name == EMBEDDING and torch.equal(tensor, theirs[:rows]) else tensor


def lm_head_of(
    checkpoint: Checkpoint, hidden_size: int, draft_ids: Tensor | None, target: LoadedModel
) -> nn.Module | None:
    """Return the file's LM head, else the target's rows of the draft's tokens; None if these are all."""
    rows = target.vocab_size if draft_ids is None else len(draft_ids)
    own = own_table(checkpoint, LM_HEAD, rows, hidden_size, target)
    if own is not None:
        return linear_of(own)
    return None if draft_ids is None else with_outputs(target.model.get_output_embeddings(), draft_ids)


def draft_ids_of(checkpoint: Checkpoint, size: int | None, target: LoadedModel) -> Tensor | None:
    """Return the target's ids of the `size` draft tokens: i + d2t[i] for i. None if all can be drafted."""
    vocab_size = target.vocab_size
    if "d2t" not in checkpoint.names:
        if size is not None and size != vocab_size:
            raise checkpoint.error(
                "d2t", f"is missing, and draft_vocab_size {size} is not the model's {vocab_size}"
            )
        return None
    offsets = checkpoint.tensor("d2t")
    check_shape(checkpoint, "d2t", offsets, (len(offsets) if size is None else size,))
    ids = torch.arange(len(offsets)) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise checkpoint.error("d2t", f"leads to token ids outside the model's {vocab_size}")
    return ids.to(target.device)


def number(checkpoint: Checkpoint, fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise checkpoint.error(name, f"must be {kind}, got {value!r}")
    return value


def activation(checkpoint: Checkpoint, layer: Mapping[str, Any]) -> str:
    name = layer.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise checkpoint.error("hidden_act", f"is {name!r}, not one of {', '.join(ACTIVATIONS)}")
    return str(name)


def rope(checkpoint: Checkpoint, layer: Mapping[str, Any], theirs: Any) -> dict[str, Any]:
    """Return the rotation's parameters, from any of three places; without a base, with the model's."""
    parameters = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    # Like speculators, some have parameters by layer type.
    parameters = dict(parameters.get("sliding_attention") or parameters)
    if (factor := parameters.get("partial_rotary_factor", layer.get("partial_rotary_factor", 1))) != 1:
        raise checkpoint.error("partial_rotary_factor", f"must be 1, got {factor}")
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    base = parameters.get("rope_theta") or layer.get("rope_theta")
    if base is None:
        base = (getattr(theirs, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    return {**parameters, "rope_theta": float(base)}
