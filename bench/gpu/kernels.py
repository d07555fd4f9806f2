"""Times of attention and matrix products alone, with torch's for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from bench.gpu.clock import time_of
from bench.gpu.model import BLOCK_SIZE, DecoderShape
from engine.batch.step_inputs import BlockTable, SequenceRows, StepShape, step_inputs
from engine.copies import upload_to
from engine.devices.attention import select_backend
from engine.kv.attention import AttentionOptions
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat

_ATTENTION = ((1, 1, 1024), (64, 1, 1024), (1, 1, 65536), (8, 8, 1024), (1, 2048, 2048), (1, 2048, 8192))
"""Shapes of attention: sequences, rows per sequence, context."""
_PRODUCT_ROWS = (1, 16, 64, 2048)
_GROUP = 128


@dataclass(frozen=True)
class KernelComparison:
    """A kernel's time, and the time of torch's SDPA or cuBLAS for the same work."""

    name: str
    ours_s: float
    torch_s: float

    @property
    def ratio(self) -> float:
        """Return the speed of our kernel as a multiple of torch's."""
        return self.torch_s / self.ours_s


def kernels_beside(shape: DecoderShape, device: torch.device, longest: int) -> Iterator[KernelComparison]:
    """Measure the kernels of one layer, attention up to `longest` keys."""
    for sequences, rows, context in _ATTENTION:
        if context <= longest:
            yield _attention(shape, device, sequences, rows, context)
    if device.type == "cuda":  # our products are Triton's
        yield from _products(shape, device)


def _attention(
    shape: DecoderShape, device: torch.device, sequences: int, rows: int, context: int
) -> KernelComparison:
    segment = Segment(1, shape.kv_heads, shape.head_dim, torch.bfloat16)
    each = -(-context // BLOCK_SIZE)
    layout = PoolLayout((Group.uniform(TARGET, segment),), BLOCK_SIZE)
    pool = KVPool(layout, sequences * each, device, None)
    backend = select_backend(device, torch.bfloat16)[0](pool.layers(TARGET))
    order = torch.randperm(sequences * each, generator=torch.Generator().manual_seed(0)).tolist()
    batch = [
        SequenceRows([1] * rows, context - rows, [order[number * each : (number + 1) * each]])
        for number in range(sequences)
    ]
    inputs = step_inputs(batch, [0], upload_to(device), BlockTable(BLOCK_SIZE), StepShape())
    backend.plan(inputs.attention)
    backend.begin_step(inputs.attention)
    count, dim = sequences * rows, shape.head_dim
    query, key, value = (
        torch.randn(count, heads, dim, device=device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    ours = partial(backend.forward, 0, query, key, value, AttentionOptions(dim**-0.5))
    queries = query.view(sequences, rows, shape.heads, dim).transpose(1, 2).contiguous()
    keys, values = (
        torch.randn(sequences, shape.kv_heads, context, dim, device=device).bfloat16() for _ in range(2)
    )
    mask = None
    if 1 < rows < context:
        mask = torch.ones(rows, context, dtype=torch.bool, device=device).tril(context - rows)
    theirs = partial(
        scaled_dot_product_attention,
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=rows == context,
        enable_gqa=True,
    )
    return _beside(f"attention, {sequences} x {rows} rows, {context} keys", ours, theirs, device)


def _products(shape: DecoderShape, device: torch.device) -> Iterator[KernelComparison]:
    """Measure the MLP's first product: in tiles, as with --deterministic, and with 4-bit weights."""
    from engine.devices.cuda.library_products import by_library
    from engine.devices.cuda.products import LIBRARIES, TiledLinear

    weight = torch.randn(2 * shape.mlp, shape.hidden, device=device).bfloat16()
    quantized = round_to_nearest(weight, CodeFormat.INT4, _GROUP)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "bf16 in tiles (--deterministic)": TiledLinear.plain(weight, None),
        f"int4, groups of {_GROUP}": TiledLinear.quantized(quantized, None),
    }
    for format, group in ((CodeFormat.INT4, _GROUP), (CodeFormat.FP8, shape.hidden)):
        own = round_to_nearest(weight, format, group)
        if (layer := by_library(LIBRARIES, own, None, torch.bfloat16)) is not None:
            forms[f"{format.value} by {layer.product.library.name}"] = layer
    for rows in _PRODUCT_ROWS:
        x = torch.randn(rows, shape.hidden, device=device).bfloat16()
        for name, tiled in forms.items():
            yield _beside(f"{name}, {rows} rows", partial(tiled, x), partial(linear, x, weight), device)


def _beside(
    name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], device: torch.device
) -> KernelComparison:
    return KernelComparison(name, time_of(ours, device).device_s, time_of(theirs, device).device_s)
