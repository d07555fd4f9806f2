"""Linear layers that our kernel multiplies on a CUDA device: with `--deterministic` all, else quantized ones
that no library multiplies.

A row's result has the same bits in every batch, since tiles have a fixed number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.devices.cuda import product_kernel
from engine.devices.cuda.fp8_products import Fp8Product
from engine.devices.cuda.library_products import LibraryLinear, by_library
from engine.devices.cuda.marlin import MarlinProduct
from engine.devices.cuda.product_kernel import multiply
from engine.linear.packed import plain_weight
from engine.linear.quantized import QuantizedLinear
from engine.model.program import Activation
from engine.quantization.weight import CodeFormat, QuantizedWeight, same_order
from engine.triton_support import ceil_div

_KINDS = {
    None: product_kernel.PLAIN,
    CodeFormat.INT8: product_kernel.INT8,
    CodeFormat.FP8: product_kernel.FP8,
    CodeFormat.INT4: product_kernel.INT4,
    CodeFormat.MXFP4: product_kernel.MXFP4,
}
LIBRARIES = (MarlinProduct, Fp8Product)
_FP8_FACTOR = 256.0
"""A factor of scales: the kernel decodes a fraction of FP8's values."""
_IN_HALVES = (CodeFormat.INT4, CodeFormat.MXFP4)
_DEPTH, _LEAST_DEPTH = 64, 32
"""Inputs that are summed before the sum is scaled; the smaller number for small groups and for float32."""
_OF_OUTPUTS = ("weight", "scales", "zeros", "bias")
TENSORS = (*_OF_OUTPUTS, "order")
ROWS = 64
"""Rows of a tile in any batch: few rows take no longer than memory takes to deliver the weights."""
_SPAN = 1024
"""Inputs of four-bit weights that are summed alone, so that several programs may share a few rows' sums; half
as many with the smaller depth, with which a program asks for half as much memory at a time.
"""
_MANY_TILES = 512
"""Tiles of 32 outputs, or programs, that together ask for enough memory at a time; twice as many with the
smaller depth.
"""


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Return zeros, which kernels leave."""
    return torch.zeros(_MANY_TILES * _DEPTH // _LEAST_DEPTH, dtype=torch.int32, device=device)


class Routes(NamedTuple):
    """The rows of each expert, from `expert_kernels`, in tiles of `rows`, of `results` in all."""

    tiles: Tensor
    places: Tensor
    rows: int
    results: int


class Tiled(nn.Module):
    """A product's tensors, each [outputs, ...]: `weight` has values or codes, two 4-bit codes per byte;
    `scales`, and `zeros` if there are zero points, are float32 [outputs, groups]; MXFP4's scales are uint8,
    exponents plus 127. `order`, int32 [inputs], is given if codes are not in the order of the inputs.
    `format` is None for plain values. Experts' tensors have one more dimension, the first.
    """

    weight: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(self, format: CodeFormat | None, depth: int, **tensors: Tensor | None) -> None:
        """Take `TENSORS`; those that are missing are None."""
        super().__init__()
        self.format, self.depth = format, depth
        for name in TENSORS:
            self.register_buffer(name, tensors.get(name))
        self.out_features, width = self.weight.shape[-2:]
        self.in_features = width * (2 if format in _IN_HALVES else 1)

    @classmethod
    def quantized(cls, weight: QuantizedWeight, bias: Tensor | None) -> Self:
        depth = _depth(weight.group_size)
        assert depth is not None
        codes = weight.codes.view(torch.uint8)
        if weight.format in _IN_HALVES:
            low, high = codes.unflatten(1, (-1, 2, depth // 2)).unbind(2)
            codes = (low | high << 4).flatten(1)
        scales = weight.scales
        if weight.format is CodeFormat.FP8:
            scales = scales * _FP8_FACTOR
        elif weight.format is CodeFormat.MXFP4:  # powers of two, whose bits are those of the exponent
            scales = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        order = None if weight.permutation is None else weight.permutation.int()
        parts = {"weight": codes, "scales": scales, "zeros": weight.zeros, "order": order, "bias": bias}
        return cls(weight.format, depth, **parts)

    @classmethod
    def plain(cls, weight: Tensor, bias: Tensor | None) -> Self:
        return cls(None, _DEPTH if weight.itemsize <= 2 else _LEAST_DEPTH, weight=weight, bias=bias)

    def values(self) -> Tensor:
        """Return one product's or one expert's weights as plain values [outputs, inputs]."""
        codes, *others = (
            None if each is None else each.reshape(-1, each.shape[-1])
            for each in (self.weight, self.scales, self.zeros, self.order)
        )
        scales, zeros, order = others
        assert codes is not None
        if self.format is None or scales is None:
            return codes
        if self.format in _IN_HALVES:
            halves = codes.unflatten(1, (-1, 1, self.depth // 2))
            codes = torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)
        elif self.format is CodeFormat.FP8:
            codes, scales = codes.view(torch.float8_e4m3fn), scales / _FP8_FACTOR
        else:
            codes = codes.view(torch.int8)
        if self.format is CodeFormat.MXFP4:
            scales = (scales.int() << 23).view(torch.float32)
        permutation = None if order is None else order[0].long()
        return QuantizedWeight(self.format, codes, scales, zeros, permutation).dequantized()

    def launch(
        self,
        rows: Tensor,
        out: Tensor,
        tiles: int,
        *,
        is_few: bool,
        routes: Routes | None = None,
        gate: Activation | None = None,
        others: Tensor | None = None,
    ) -> None:
        """Multiply `rows` in a number of `tiles`. With `routes`, each by its experts. With a `gate`, rows are
        activated before, and multiplied by the rows `others` or, without these, each row's first half by its
        second.
        """
        outputs, inputs = out.shape[1], self.in_features
        if gate not in (None, Activation.CLAMPED_SWIGLU) and others is None:
            others = rows[:, inputs:]
        size = ROWS if routes is None else routes.rows
        columns = 32 if is_few or rows.itemsize > 2 else 128
        step = self.depth // (2 if self.format in _IN_HALVES else 1)
        if size < ROWS:  # 128 threads copy 128 bits of the weight each
            columns = max(64, 128 * 16 // (step * self.weight.itemsize))
        copied = size * rows.itemsize * step
        # Below this each thread of eight warps would copy less than 128 bits.
        warps = 4 if is_few or copied < 8 * 32 * 16 else 8
        span, spans, parts, arrivals = inputs, 1, None, None
        if self.format in _IN_HALVES and routes is None:
            share = _DEPTH // self.depth
            span = min(_SPAN // share, inputs)
            columns, warps = min(columns, 64), 4  # two sums take more registers
            if is_few and span < inputs and ceil_div(outputs, columns) < _MANY_TILES * share:
                spans = ceil_div(inputs, span)
                parts = rows.new_empty((spans, len(rows), outputs), dtype=torch.float32)
                arrivals = _arrivals(rows.device)
        multiply[(tiles, ceil_div(outputs, columns), spans)](
            rows,
            others,
            self.weight,
            self.scales,
            self.zeros,
            self.order,
            self.bias,
            None if routes is None else routes.tiles,
            None if routes is None else routes.places,
            parts,
            arrivals,
            out,
            len(out),
            rows.stride(0),
            0 if others is None else others.stride(0),
            SHARED=len(out) // len(rows),
            OUTPUTS=outputs,
            INPUTS=inputs,
            SPAN=span,
            GATE=None if gate is None else gate.value,
            GROUP=inputs if self.scales is None else inputs // self.scales.shape[-1],
            KIND=_KINDS[self.format],
            ROWS=size,
            COLUMNS=columns,
            DEPTH=self.depth,
            PRECISION="ieee",
            num_warps=warps,
            num_stages=4 if is_few else 3,
        )


class TiledLinear(Tiled):
    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` [..., inputs]; return [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return self._of_rows(rows).view(*x.shape[:-1], self.out_features)

    def of_gated(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        """Multiply rows of activated `gates`, times `values`."""
        return self._of_rows(gates, activation, values)

    def _of_rows(self, rows: Tensor, gate: Activation | None = None, others: Tensor | None = None) -> Tensor:
        out = rows.new_empty((len(rows), self.out_features))
        if len(rows):
            tiles, is_few = ceil_div(len(rows), ROWS), len(rows) <= ROWS
            self.launch(rows, out, tiles, is_few=is_few, gate=gate, others=others)
        return out

    def is_like(self, other: TiledLinear) -> bool:
        """Return whether both can be joined into one product of the same inputs."""
        return self._kind == other._kind and same_order(self.order, other.order)

    @property
    def _kind(self) -> tuple[object, ...]:
        tensors = (getattr(self, name) for name in _OF_OUTPUTS)
        return self.format, self.depth, *(None if each is None else each.shape[1:] for each in tensors)


def fits(weight: QuantizedWeight) -> bool:
    """Return whether the kernel can multiply by the weight."""
    return _depth(weight.group_size) is not None


def _depth(group_size: int) -> int | None:
    return next((depth for depth in (_DEPTH, _LEAST_DEPTH) if group_size % depth == 0), None)


def tile_linears(model: nn.Module, dtype: torch.dtype, *, plain: bool) -> None:
    """Replace the model's quantized layers, freeing their weights, and with `plain` its other linear layers.
    Without `plain`, a library multiplies by the quantized weights that it fits. A quantized layer that the
    kernel does not fit becomes a plain one.
    """
    for path, module in list(model.named_modules()):
        made = tiled(module, dtype, plain=plain)
        if made is not module:
            model.set_submodule(path, made)


def tiled(module: nn.Module, dtype: torch.dtype, *, plain: bool) -> nn.Module:
    if isinstance(module, QuantizedLinear):
        made = None if plain else by_library(LIBRARIES, module.quantized, module.bias, dtype)
        if made is not None:
            return made
        if fits(module.quantized):
            return TiledLinear.quantized(module.quantized, module.bias)
        module = module.plain(dtype)
    if plain and isinstance(module, nn.Linear | Conv1D) and type(module) in (nn.Linear, Conv1D):
        weight = plain_weight(module).detach().contiguous()
        return TiledLinear.plain(weight, module.bias)
    return module


def join(linears: Sequence[TiledLinear]) -> TiledLinear:
    """Join compatible layers of one input into one product, and make the layers views of it. Joining the same
    layers again returns the same memory.
    """
    first = linears[0]
    if len(linears) == 1:
        return first
    parts = {name: concatenated([getattr(each, name) for each in linears]) for name in _OF_OUTPUTS}
    joined, end = TiledLinear(first.format, first.depth, order=first.order, **parts), 0
    for linear in linears:
        begin, end, linear.order = end, end + linear.out_features, first.order
        for name, whole in parts.items():
            setattr(linear, name, None if whole is None else whole[begin:end])
    return joined


def concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate tensors [outputs, ...]; None if all are None. Parts of one tensor return that tensor."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    first, size = there[0], sum(map(len, there))
    are_parts = len({part.untyped_storage().data_ptr() for part in there}) == 1
    if are_parts and first.untyped_storage().nbytes() == size * first[0].numel() * first.itemsize:
        return first.as_strided((size, *first.shape[1:]), first.stride(), 0)
    return torch.cat(there)


def describe(modules: Iterable[nn.Module], dtype: torch.dtype) -> str:
    """Say how the linear layers among the modules multiply."""
    plain = f"cuBLAS, {str(dtype).removeprefix('torch.')}"
    linears = [module for module in modules if isinstance(module, TiledLinear | LibraryLinear)]
    counts = Counter(_multiplier(linear) for linear in linears)
    parts = [f"{count} layers {how}" for how, count in counts.items()]
    return "; ".join([*parts, f"others {plain}"]) if parts else plain


def _multiplier(linear: TiledLinear | LibraryLinear) -> str:
    if isinstance(linear, TiledLinear):
        return "in tiles, summed alike in every batch"
    return f"by {linear.product.library.name}"
