"""The operators in C++ for CPUs, and which operators serve a model."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.recurrent.layout import StateLayout
from engine.recurrent.operators import StepOperators, TorchOperators
from engine.recurrent.seats import RowSpan, Seats
from engine.recurrent.structs import ConvArgs, LinearArgs, SpanArgs, SpansArgs
from engine.triton_support import triton_fault
from native.build import BuildError, declare, load_library
from native.openmp import gomp_parallel

logger = logging.getLogger("tandem.engine")


def operators_of(seats: Seats) -> StepOperators:
    """In C++ or Triton where that serves these seats, else torch's."""
    on_cpu = seats.device.type == "cpu"
    fault = _cpu_fault(seats.layout) if on_cpu else triton_fault(seats.device)
    try:
        if fault is None:
            return CpuOperators(seats) if on_cpu else _triton_operators(seats)
    except (BuildError, ValueError) as error:
        fault = str(error)
    logger.warning("recurrent layers run in torch's operators: %s", fault)
    return TorchOperators(seats)


def _cpu_fault(layout: StateLayout) -> str | None:
    if layout.dtype not in (torch.float32, torch.bfloat16):
        return f"the cpu kernel does not take {layout.dtype}"
    reach = max(layer.taps - 1 for layer in layout.layers)
    return f"the cpu kernel does not take convolutions of {reach + 1}" if reach > layout.grid else None


def _triton_operators(seats: Seats) -> StepOperators:
    """Raises ValueError where the kernels do not take such states."""
    kernels = importlib.import_module("engine.recurrent.triton_kernel.operators")  # not there on every host
    operators: StepOperators = kernels.TritonOperators(seats)
    return operators


@functools.cache
def _library() -> tuple[Callable[..., None], Callable[..., None]]:
    """Raises BuildError."""
    library = load_library(Path(__file__).parent / "recurrent.cpp", SpanArgs, SpansArgs, ConvArgs, LinearArgs)
    arguments = ctypes.c_void_p, ctypes.c_void_p
    conv = declare(library, "tandem_causal_conv", None, *arguments)
    return conv, declare(library, "tandem_linear_attention", None, *arguments)


class CpuOperators:
    """Raises BuildError where the kernel cannot be built."""

    name = "cpu"

    def __init__(self, seats: Seats) -> None:
        self._conv, self._attend = _library()
        self._seats = seats
        self._parallel = gomp_parallel()
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._spans, self._rows = SpansArgs(), np.zeros(0, np.int64)
        self._masks: list[np.ndarray | None] = []

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        self._masks = [None if span.masks is None else np.array(span.masks, np.uint64) for span in spans]
        rows = [
            (
                *(span.seat, self._seats.run(span), span.start, span.count, span.certain, span.tree_start),
                0 if masks is None else masks.ctypes.data,
            )
            for span, masks in zip(spans, self._masks, strict=True)
        ]
        self._rows = np.array(rows, np.int64)
        layout, threads = self._seats.layout, torch.get_num_threads()
        self._spans = SpansArgs(
            self._rows.ctypes.data, len(spans), layout.grid, layout.window, threads, self._parallel
        )

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, inputs = self._seats.layers[layer], inputs.contiguous()
        if layer not in self._weights:  # weights never change
            floats = weight.float().t().contiguous(), None if bias is None else bias.float()
            self._weights[layer] = floats
        taps, offsets = self._weights[layer]
        out = torch.empty(inputs.shape, dtype=torch.float32)
        args = ConvArgs(
            *map(_address, (inputs, taps, offsets, out, of.tail, of.inputs)),
            *map(_step, (of.tail, of.inputs)),
            inputs.shape[1],
            len(taps),
            inputs.dtype is torch.bfloat16,
        )
        self._conv(ctypes.byref(self._spans), ctypes.byref(args))
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

    def _run_linear(self, layer: int, *rows: Tensor | None) -> Tensor:
        """From the query to the rates."""
        of = self._seats.layers[layer]
        inputs = [None if each is None else each.contiguous() for each in rows]
        _, key, value, decay, *_ = inputs
        assert key is not None and value is not None and decay is not None
        out = torch.empty_like(value)
        seats = of.state, of.keys, of.deltas, of.decays
        args = LinearArgs(
            *map(_address, (*inputs, out, *seats)),
            *map(_step, seats),
            value.shape[1],
            *key.shape[1:],
            value.shape[2],
            decay.shape[2],
        )
        self._attend(ctypes.byref(self._spans), ctypes.byref(args))
        return out


def _address(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()


def _step(seats: Tensor) -> int:
    """Bytes from one seat to the next."""
    return seats.stride(0) * seats.element_size()
