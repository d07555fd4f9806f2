"""An adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
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
_PIECE_BYTES = 1 << 24
"""So much is read at a time."""
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


class RawAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of an adapter's two files."""

    config: bytes
    tensors: bytes

    @property
    def digest(self) -> str:
        content = hashlib.blake2b(hashlib.blake2b(self.config).digest(), digest_size=16)
        content.update(self.tensors)
        return content.hexdigest()


class AdapterFiles(NamedTuple):
    raw: RawAdapter
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


def read_adapter(
    path: str,
    linears: Mapping[str, LinearShape],
    max_rank: int,
    on_piece: Callable[[], None] = lambda: None,
) -> AdapterFiles:
    """The adapter in this folder, for a model with these linear layers; `on_piece` is called after each piece
    that was read and each tensor that was checked. Raises `AdapterError`.
    """
    folder = Path(path)
    config = _read(folder, CONFIG, _HEADER_BYTES, on_piece)
    _config(config, max_rank)  # before much is read
    most = sum(max_rank * (shape.outputs + shape.inputs) * 4 for shape in linears.values())
    raw = RawAdapter(config, _read(folder, TENSORS, most + _HEADER_BYTES, on_piece))
    return parse_adapter(raw, linears, max_rank, on_piece)


def parse_adapter(
    raw: RawAdapter,
    linears: Mapping[str, LinearShape],
    max_rank: int,
    on_piece: Callable[[], None] = lambda: None,
) -> AdapterFiles:
    """As `read_adapter`, of files that were read before."""
    config = _config(raw.config, max_rank)
    try:
        tensors = safetensors.torch.load(raw.tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterError(f"{TENSORS}: is no safetensors file: {error}") from error
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, tensor in tensors.items():
        layer, side = _place(name, linears)
        _check_tensor(name, tensor, side, config.rank(layer), linears[layer])
        sides[side][layer] = tensor.float()
        on_piece()
    if not tensors:
        raise AdapterError(f"{TENSORS}: has no tensor")
    layers = dict.fromkeys([*sides[0], *sides[1]])
    return AdapterFiles(raw, raw.digest, {layer: _product(layer, *sides, config) for layer in layers})


def _read(folder: Path, name: str, most: int, on_piece: Callable[[], None]) -> bytes:
    """The whole file. A pipe or a device, which might never end, is refused unread."""
    raw = bytearray()
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AdapterError(f"{name}: is no regular file")
            while len(raw) <= most and (piece := file.read(min(_PIECE_BYTES, most + 1 - len(raw)))):
                raw += piece
                on_piece()
    except OSError as error:
        raise AdapterError(f"{name}: cannot be read: {error}") from error
    if len(raw) > most:
        raise AdapterError(f"{name}: has more than the {most} bytes that an adapter of this model can have")
    return bytes(raw)


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
