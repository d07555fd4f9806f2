"""Adapters on a CUDA device: two launches add the part of each row's adapter to a product.

A row's result has the same bits in every batch: inputs are summed in splits of one size, and rows of a tile
with the same adapter are multiplied together, as in the tiles of `products`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from engine.devices.cuda.adapter_kernels import expand, shrink
from engine.lora.table import Adapters
from engine.triton_support import ceil_div, power_of_two

_ROWS, _COLUMNS, _MOST_RANKS = 16, 128, 64
"""The rows, columns and ranks that one program computes."""
_SPLIT, _DEPTH_BYTES = 1024, 256
"""Inputs that a program sums, and the bytes of them that it loads at a time."""
_STEP = 16
"""The most useful alignment of parts: a larger one makes loads no wider."""


@dataclass(frozen=True)
class AdaptedProduct:
    """A product of one input whose adjacent parts are linear layers. `parts`, int32 [parts, 3], has each
    layer's number in adapters' tables, its first column and its number of outputs, at most `widest`. Parts
    begin and end at multiples of `step`. Adapters have the dtype `dtype` and ranks up to `max_rank`.
    """

    parts: Tensor
    inputs: int
    widest: int
    step: int
    max_rank: int
    dtype: torch.dtype

    @classmethod
    def of(cls, paths: Sequence[str], adapters: Adapters) -> AdaptedProduct:
        numbers, shapes = [*adapters.linears], [adapters.own_shape(path) for path in paths]
        parts, first = [], 0
        for path, shape in zip(paths, shapes, strict=True):
            parts.append([numbers.index(path), first, shape.outputs])
            first += shape.outputs
        on_device = torch.tensor(parts, dtype=torch.int32, device=adapters.device)
        outputs = [shape.outputs for shape in shapes]
        step = gcd(_STEP, *outputs)
        return cls(on_device, shapes[0].inputs, max(outputs), step, adapters.max_rank, adapters.dtype)

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add each row's adapter's part, for the inputs `x` [..., inputs], to `out` [..., outputs].
        `adapters`, int64 [rows], has the adapters' addresses (`Adapters.addresses`).
        """
        rows, whole = x.reshape(-1, self.inputs).to(self.dtype), out.view(-1, out.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        self._expand(self._shrink(rows, adapters), whole, adapters)

    def _shrink(self, rows: Tensor, adapters: Tensor) -> Tensor:
        constants = self._constants
        num_parts, splits, blocks = (constants[name] for name in ("PARTS", "SPLITS", "BLOCKS"))
        sizes = len(rows), num_parts, splits, blocks * constants["RANKS"]
        shrunk = rows.new_empty(sizes, dtype=torch.float32)
        shrink[(len(rows), num_parts, splits * blocks)](
            rows,
            adapters,
            self.parts,
            shrunk,
            len(rows),
            rows.stride(0),
            INPUTS=self.inputs,
            SPLIT=_SPLIT,
            DEPTH=_DEPTH_BYTES // self.dtype.itemsize,
            **constants,
        )
        return shrunk

    def _expand(self, shrunk: Tensor, out: Tensor, adapters: Tensor) -> None:
        expand[(len(out), len(self.parts), ceil_div(self.widest, _COLUMNS))](
            shrunk,
            adapters,
            self.parts,
            out,
            len(out),
            out.stride(0),
            COLUMNS=_COLUMNS,
            STEP=self.step,
            **self._constants,
        )

    @property
    def _constants(self) -> dict[str, Any]:
        ranks = min(power_of_two(self.max_rank), _MOST_RANKS)
        return {
            "PARTS": len(self.parts),
            "SPLITS": ceil_div(self.inputs, _SPLIT),
            "ROWS": _ROWS,
            "RANKS": ranks,
            "BLOCKS": ceil_div(self.max_rank, ranks),
            "DTYPE": getattr(tl, str(self.dtype).removeprefix("torch.")),
            "PRECISION": "ieee",
            "num_warps": 4,
        }


def adapted_modules(adapters: Adapters) -> Callable[[Tensor], ModuleAdapters]:
    """Return a function that makes a step's additions to modules from the addresses of rows' adapters."""
    products = {path: AdaptedProduct.of([path], adapters) for path in adapters.linears}
    return partial(ModuleAdapters, products)


class ModuleAdapters(NamedTuple):
    """The additions to a model's modules in a step (`engine.lora.layers`): `products` by linear layers'
    paths, and the rows' `adapters` as `AdaptedProduct.add` takes them.
    """

    products: Mapping[str, AdaptedProduct]
    adapters: Tensor

    def add(self, out: Tensor, x: Tensor, path: str) -> None:
        self.products[path].add(out, x, self.adapters)
