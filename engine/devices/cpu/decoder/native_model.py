"""The memory of a model that the native decoder runs: packed weights and tables, with their addresses.

Structs are those of `structs.h`, with `Args` after their names. It explains the fields.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import Structure
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.copies import HugePages
from engine.linear.packed import QuantizedArgs, pack
from engine.linear.packed_quantized import PackedQuantizedLinear, PackedWeight, join
from native.build import load_library
from native.structs import fields

_STRUCTS = Path(__file__).parent / "structs.h"


class WeightsArgs(Structure):
    _fields_ = fields(_STRUCTS, "Weights")


class RecurrentArgs(Structure):
    _fields_ = fields(_STRUCTS, "Recurrent", WeightsArgs)


class LatentArgs(Structure):
    _fields_ = fields(_STRUCTS, "Latent", WeightsArgs)


class ExpertWeightsArgs(Structure):
    _fields_ = fields(_STRUCTS, "ExpertWeights")


class ExpertsArgs(Structure):
    _fields_ = fields(_STRUCTS, "Experts", WeightsArgs, ExpertWeightsArgs)


class LayerArgs(Structure):
    _fields_ = fields(_STRUCTS, "Layer", WeightsArgs)


class HeadInputArgs(Structure):
    _fields_ = fields(_STRUCTS, "HeadInput", WeightsArgs)


class ModelArgs(Structure):
    _fields_ = fields(_STRUCTS, "Model", WeightsArgs)


class RowsArgs(Structure):
    _fields_ = fields(_STRUCTS, "Rows")


class BatchArgs(Structure):
    _fields_ = fields(_STRUCTS, "Batch")


class DraftArgs(Structure):
    _fields_ = fields(_STRUCTS, "Draft", BatchArgs)


_SOURCES = {torch.bfloat16: "decoder.cpp", torch.float32: "decoder_float32.cc"}


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the compiled decoder for `dtype`. Raises BuildError."""
    return load_library(Path(__file__).parent / _SOURCES[dtype])


LayerPaths = tuple[tuple[str, ...], ...]
"""The model paths of the linear layers in each of a layer's products, in the order of `Product` in
`structs.h`.
"""

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""A layer's fields with products."""

DTYPES = tuple(_SOURCES)


class NativeModel:
    """A model in the C++ structs. The memory that `model` points to lives as long as this object."""

    model: ModelArgs
    layers: ctypes.Array[LayerArgs]
    paths: Sequence[LayerPaths] = ()
    """For each of `layers`, the linear layers that adapters may add to."""
    columns: Mapping[str, range] = {}
    """The computed outputs of some linear layers, by path; all outputs of the others are computed."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Make an empty model with weights and rows of `dtype`, one of `DTYPES`."""
        self.dtype = dtype
        self._memory = HugePages()
        self._kept: list[Tensor] = []
        self._quantized: dict[int, tuple[QuantizedArgs, PackedWeight, Tensor | None]] = {}
        """The structs by address, each with the packed weight and the bias that it points to."""
        self._experts: list[ExpertsArgs | QuantizedArgs] = []

    def keep(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        """Return the address of the tensor's values, by default in the model's dtype."""
        if tensor is None:
            return None
        values = tensor.detach().to(dtype or self.dtype).contiguous()
        self._kept.append(values)
        return values.data_ptr()

    def keep_floats(self, tensor: Tensor | None) -> int | None:
        return self.keep(tensor, torch.float32)

    def hold(self, tensor: Tensor) -> Tensor:
        """Return an unconverted copy of the tensor, and keep it alive."""
        values = self._memory.copy(tensor.detach())
        self._kept.append(values)
        return values

    def keep_experts(self, args: ExpertsArgs | QuantizedArgs) -> int:
        """Keep the struct alive. Return its address."""
        self._experts.append(args)
        return ctypes.addressof(args)

    def kept(self, address: int) -> Tensor:
        """Return the tensor that `keep` put at this address."""
        return next(tensor for tensor in self._kept if tensor.data_ptr() == address)

    def keep_quantized(self, weight: PackedWeight, bias: Tensor | None, first: int = 0) -> WeightsArgs:
        args = weight.args(bias)
        address = ctypes.addressof(args)
        self._quantized[address] = args, weight, bias
        return WeightsArgs(None, None, address, weight.in_features, weight.out_features, first)

    def kept_quantized(self, address: int) -> tuple[PackedWeight, Tensor | None]:
        """Return the weight and bias that `keep_quantized` put at this address."""
        _, weight, bias = self._quantized[address]
        return weight, bias

    @property
    def num_bytes(self) -> int:
        """Size of all tensors that the model reads, in bytes."""
        tensors = list(self._kept)
        for _, weight, bias in self._quantized.values():
            tensors += [each for each in (*weight.tensors, bias) if each is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def weights(self, *linears: nn.Linear | PackedQuantizedLinear) -> WeightsArgs:
        """Return one product of linear layers with one input. Quantized layers must be alike."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        packed = [linear.packed for linear in linears if isinstance(linear, PackedQuantizedLinear)]
        if packed:
            weight = join(packed).copied(self._memory.copy)
            if isinstance(linears[0], PackedQuantizedLinear) and len(linears) == 1:  # the head stays in use
                linears[0].words, linears[0].scales, linears[0].minima = weight.tensors[:3]
            return self.keep_quantized(weight, bias)
        return self.matrix(torch.cat([linear.weight for linear in linears]), bias)

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> WeightsArgs:
        packed = pack(weight.detach(), together=2 if self.dtype is torch.bfloat16 else 1)
        values, biases = self.keep(self._memory.copy(packed)), self.keep(bias)
        return WeightsArgs(values, biases, None, weight.shape[1], len(weight))

    def count_products(self) -> None:
        """Set the model's number of multiplications for a row, by which the decoder chooses threads."""
        products = [getattr(layer, name) for layer in self.layers for name in PRODUCTS]
        count = sum(each.inputs * each.outputs for each in [*products, self.model.head])
        for address in filter(None, (layer.experts for layer in self.layers)):
            experts = ExpertsArgs.from_address(address)
            for each in (experts.first, experts.second):
                count += experts.chosen * each.inputs * each.outputs
        self.model.products = count
