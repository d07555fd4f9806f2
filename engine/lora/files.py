"""An adapter's folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engine.lora.config import (
    CONFIG,
    HEADER_BYTES,
    TENSORS,
    AdapterConfig,
    AdapterError,
    parse_config,
    read_file,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PREFIX = "base_model.model."
_SIDES = {"lora_A.weight": 0, "lora_B.weight": 1}


class LinearShape(NamedTuple):
    outputs: int
    inputs: int


class LowRankProduct(NamedTuple):
    """A product added to a linear layer's outputs: `up` [out, rank] @ `down` [rank, in] @ x, in float32."""

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
    products: dict[str, LowRankProduct]
    """The products by the linear layers' paths."""


def read_adapter(
    path: str,
    linears: Mapping[str, LinearShape],
    max_rank: int,
    on_piece: Callable[[], None] = lambda: None,
) -> AdapterFiles:
    """Read the adapter in a folder, for a model with these linear layers. Call `on_piece` after each piece
    read and each tensor checked. Raises `AdapterError`.
    """
    folder = Path(path)
    config = read_file(folder, CONFIG, HEADER_BYTES, on_piece)
    parse_config(config, max_rank)  # checked before the tensors are read
    most = sum(max_rank * (shape.outputs + shape.inputs) * 4 for shape in linears.values())
    raw = RawAdapter(config, read_file(folder, TENSORS, most + HEADER_BYTES, on_piece))
    return parse_adapter(raw, linears, max_rank, on_piece)


def parse_adapter(
    raw: RawAdapter,
    linears: Mapping[str, LinearShape],
    max_rank: int,
    on_piece: Callable[[], None] = lambda: None,
) -> AdapterFiles:
    """Parse files read earlier. Raises and calls `on_piece` like `read_adapter`."""
    config = parse_config(raw.config, max_rank)
    try:
        tensors = safetensors.torch.load(raw.tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise AdapterError(f"{TENSORS}: is not a safetensors file: {error}") from error
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


def _place(name: str, linears: Mapping[str, LinearShape]) -> tuple[str, int]:
    """Return the path of the tensor's layer, and 0 for `down` or 1 for `up`."""
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


def _product(
    layer: str, downs: dict[str, Tensor], ups: dict[str, Tensor], config: AdapterConfig
) -> LowRankProduct:
    for letter, side in ("A", downs), ("B", ups):
        if layer not in side:
            raise AdapterError(f"{TENSORS}: {_PREFIX}{layer}.lora_{letter}.weight: is missing")
    down = downs[layer]
    up = ups[layer] * config.scale(layer, len(down))
    for letter, tensor in ("A", down), ("B", up):
        if not tensor.isfinite().all():
            where = f"{TENSORS}: {_PREFIX}{layer}.lora_{letter}.weight"
            raise AdapterError(f"{where}: not all of its values, scaled by lora_alpha, are finite")
    return LowRankProduct(down, up)
