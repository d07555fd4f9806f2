"""The operators of recurrent layers in C++, for CPUs.

`structs.h` explains the structs, which have the same names without `Args`.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch.runner import StepOperators
from engine.kv.state_slots import LayerStateSlots, RowSpan, StateSlots
from native.build import load_library
from native.structs import fields
from native.threads import gomp_parallel

_STRUCTS = Path(__file__).parent / "structs.h"


class SpanArgs(Structure):
    _fields_ = fields(_STRUCTS, "Span")


class SpansArgs(Structure):
    _fields_ = fields(_STRUCTS, "Spans")


class SlotArrayArgs(Structure):
    _fields_ = fields(_STRUCTS, "SlotArray")


class LayerStateSlotsArgs(Structure):
    _fields_ = fields(_STRUCTS, "LayerStateSlots", SlotArrayArgs)


class ConvArgs(Structure):
    _fields_ = fields(_STRUCTS, "Conv")


class LinearAttentionArgs(Structure):
    _fields_ = fields(_STRUCTS, "LinearAttention")


@functools.cache
def kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the convolution and linear attention. Raises BuildError."""
    library = load_library(Path(__file__).parent / "recurrent.cpp")
    return library.tandem_causal_conv, library.tandem_linear_attention


def layer_state_slots(state_slots: StateSlots) -> ctypes.Array[LayerStateSlotsArgs]:
    """Return each layer's slots in the kernels' structs."""
    is_bf16 = state_slots.layout.dtype is torch.bfloat16
    described = []
    for layer, of in zip(state_slots.layout.layers, state_slots.layers, strict=True):
        parts = LayerStateSlots(*(SlotArrayArgs(part.data_ptr(), _step(part)) for part in of))
        sizes = layer.num_heads, layer.num_key_heads, layer.key_dim, layer.value_dim, layer.decay_dim
        described.append(LayerStateSlotsArgs(*parts, layer.channels, layer.taps, is_bf16, *sizes))
    return (LayerStateSlotsArgs * len(described))(*described)


class CpuSpans:
    """The sequences of a step in the kernels' structs."""

    def __init__(self, state_slots: StateSlots) -> None:
        self._state_slots = state_slots
        self._parallel = gomp_parallel()
        self._numbers = array("q")
        self._masks: list[array[int]] = []
        self.args = SpansArgs()

    def begin(self, spans: Iterable[RowSpan]) -> None:
        """Fill in the structs; they are valid until the next call."""
        self._numbers, self._masks = array("q"), []
        for span in spans:
            paths = 0
            if span.masks is not None:
                self._masks.append(array("Q", span.masks))
                paths, _ = self._masks[-1].buffer_info()
            where = span.state_slot, self._state_slots.run(span), span.start, span.count
            self._numbers.extend((*where, span.certain, span.tree_start, paths))  # SpanArgs
        address, length = self._numbers.buffer_info()
        layout, threads = self._state_slots.layout, torch.get_num_threads()
        count = length // len(SpanArgs._fields_)
        self.args = SpansArgs(address, count, layout.grid, layout.window, threads, self._parallel)


class CpuOperators(StepOperators):
    """The operators by the native kernels. Raises BuildError if they cannot be built."""

    name = "cpu"

    def __init__(self, state_slots: StateSlots) -> None:
        self._conv, self._attend = kernels()
        self._state_slots = state_slots  # keeps the kernels' memory alive
        self._layers = layer_state_slots(state_slots)
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._spans = CpuSpans(state_slots)

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        self._spans.begin(spans)

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        inputs = inputs.contiguous()
        if layer not in self._weights:  # weights never change
            floats = weight.float().t().contiguous(), None if bias is None else bias.float()
            self._weights[layer] = floats
        taps, offsets = self._weights[layer]
        out = torch.empty(inputs.shape, dtype=torch.float32)
        rows = map(_address, (inputs, taps, offsets, out))
        args = ConvArgs(ctypes.addressof(self._layers[layer]), *rows, inputs.shape[1])
        self._conv(ctypes.byref(self._spans.args), ctypes.byref(args))
        return out

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        return self._run_linear(layer, query, key, value, decay, beta, None)

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        one_head = query[:, None], key[:, None]
        return self._run_linear(layer, *one_head, value[..., None], times[..., None], None, rates)[..., 0]

    def _run_linear(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None
    ) -> Tensor:
        """Run the kernel. `others` are decay, beta and rates."""
        inputs = [None if each is None else each.contiguous() for each in (query, key, value, *others)]
        out = torch.empty(value.shape)
        rows = map(_address, (*inputs, out))
        steps = (part.shape[1] * part.shape[2] for part in (query, key, value))
        args = LinearAttentionArgs(ctypes.addressof(self._layers[layer]), *rows, *steps)
        self._attend(ctypes.byref(self._spans.args), ctypes.byref(args))
        return out


def _address(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()


def _step(state_slots: Tensor) -> int:
    """Return the bytes from one state slot to the next."""
    return state_slots.stride(0) * state_slots.element_size()
