"""An adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from protocol.errors import TandemError
from protocol.fields import FieldError, to_struct

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PREFIX = "base_model.model."
_SIDES = {"lora_A.weight": 0, "lora_B.weight": 1}
_HEADER_BYTES = 1 << 20
_CHANGES = {
    "use_dora": "DoRA scales the base's weights by column",
    "modules_to_save": "it replaces layers of the base",
    "layer_replication": "it changes the base's layers",
    "target_parameters": "it adapts parameters that are no linear layer's",
    "trainable_token_indices": "it changes embeddings",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "lora_bias": "it adds biases",
}
"""Fields that ask for more than products beside linear layers."""


class AdapterError(TandemError):
    """An adapter that cannot be served; the message names the file, and the field or the tensor."""


class LinearShape(NamedTuple):
    outputs: int
    inputs: int


class Product(NamedTuple):
    """What is added to a linear layer's outputs: `up` @ `down` @ x, in float32; [rank, in], [out, rank]."""

    down: Tensor
    up: Tensor


class AdapterFiles(NamedTuple):
    digest: str
    products: dict[str, Product]
    """By the paths of the linear layers."""


class _Config(msgspec.Struct):
    """The fields of PEFT's `LoraConfig` that say what its tensors mean."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool | None = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str | None = "none"

    def scale(self, path: str, rank: int) -> float:
        alpha = _by_pattern(self.alpha_pattern, path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, path: str) -> int:
        return int(_by_pattern(self.rank_pattern, path, self.r))


def read_adapter(path: str, linears: Mapping[str, LinearShape], max_rank: int) -> AdapterFiles:
    """The adapter of a model with these linear layers. Raises `AdapterError`."""
    folder = Path(path)
    raw_config = _read(folder, CONFIG, _HEADER_BYTES)
    config = _config(raw_config, max_rank)
    most = sum(max_rank * (shape.outputs + shape.inputs) * 4 for shape in linears.values())
    raw = _read(folder, TENSORS, most + _HEADER_BYTES)
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterError(f"{TENSORS}: is no safetensors file: {error}") from error
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, tensor in tensors.items():
        layer, side = _place(name, linears)
        _check_tensor(name, tensor, side, config.rank(layer), linears[layer])
        sides[side][layer] = tensor.float()
    if not tensors:
        raise AdapterError(f"{TENSORS}: has no tensor")
    digest = hashlib.blake2b(hashlib.blake2b(raw_config).digest() + raw, digest_size=16).hexdigest()
    layers = dict.fromkeys([*sides[0], *sides[1]])
    return AdapterFiles(digest, {layer: _product(layer, *sides, config) for layer in layers})


def _read(folder: Path, name: str, most: int) -> bytes:
    try:
        with (folder / name).open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise AdapterError(f"{name}: cannot be read: {error}") from error
    if len(raw) > most:
        raise AdapterError(f"{name}: has more than the {most} bytes that an adapter of this model can have")
    return raw


def _config(raw: bytes, max_rank: int) -> _Config:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{CONFIG}: is no object")
    try:
        config = to_struct({key: fields[key] for key in _Config.__struct_fields__ if key in fields}, _Config)
    except FieldError as error:
        raise AdapterError(f"{CONFIG}: {error}") from error
    if config.peft_type != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type: must be LORA, got {config.peft_type[:64]!r}")
    if config.bias not in (None, "none"):
        raise AdapterError(f"{CONFIG}: bias: must be none, got {config.bias[:64]!r}")
    for name, why in _CHANGES.items():
        if fields.get(name):
            raise AdapterError(f"{CONFIG}: {name}: not supported: {why}")
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if not 1 <= rank <= max_rank:
            raise AdapterError(f"{CONFIG}: r: must be from 1 to --max-lora-rank {max_rank}, got {rank}")
    return config


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: float) -> float:
    """As PEFT reads `rank_pattern` and `alpha_pattern`: the first key that the path ends with."""
    for key, value in (patterns or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", path)
        except re.error as error:
            raise AdapterError(f"{CONFIG}: pattern {key[:64]!r}: {error}") from error
        if matches:
            return value
    return default


def _place(name: str, linears: Mapping[str, LinearShape]) -> tuple[str, int]:
    """The path of the tensor's layer, and which of the two it is."""
    for ending, side in _SIDES.items():
        layer = name.removeprefix(_PREFIX).removesuffix("." + ending)
        if name.endswith("." + ending):
            if layer not in linears:
                raise AdapterError(f"{TENSORS}: {name}: the model has no such linear layer to adapt")
            return layer, side
    raise AdapterError(f"{TENSORS}: {name}: not supported, only {' and '.join(_SIDES)} of linear layers")


def _check_tensor(name: str, tensor: Tensor, side: int, rank: int, shape: LinearShape) -> None:
    expected = (shape.outputs, rank) if side else (rank, shape.inputs)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        got = str(tensor.dtype).removeprefix("torch.")
        raise AdapterError(f"{TENSORS}: {name}: the dtype must be one of {known}, got {got}")
    if tuple(tensor.shape) != expected:
        raise AdapterError(
            f"{TENSORS}: {name}: must have the shape {list(expected)}, got {list(tensor.shape)}"
        )


def _product(layer: str, downs: dict[str, Tensor], ups: dict[str, Tensor], config: _Config) -> Product:
    for letter, side in ("A", downs), ("B", ups):
        if layer not in side:
            raise AdapterError(f"{TENSORS}: {_PREFIX}{layer}.lora_{letter}.weight: is missing")
    down = downs[layer]
    return Product(down, ups[layer] * config.scale(layer, len(down)))
