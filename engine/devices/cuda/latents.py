"""Latent attention (`engine.devices.torch.latent_attention`) on a CUDA device: five launches, one of them for
the queries' second product. Rows have the same bits in every batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.devices.cuda.kernels import rounded, weighted
from engine.kv.attention import AttentionOptions
from engine.model.program import LatentAttention
from engine.triton_support import ceil_div, power_of_two


@triton.jit
def _turned(part, angle, cosines, sines, SIZE: tl.constexpr, PADDED: tl.constexpr, PAIRS: tl.constexpr):
    """Load parts of SIZE values and rotate them: `part` has addresses [n, 1], `angle` places in the tables.
    With PAIRS, values that turn together are neighbours, and apart by half of SIZE once rotated.
    """
    d = tl.arange(0, PADDED)
    inside, other = d < SIZE, (d + SIZE // 2) % SIZE
    at, opposite = d, other
    if PAIRS:
        at, opposite = d % (SIZE // 2) * 2 + d // (SIZE // 2), other % (SIZE // 2) * 2 + other // (SIZE // 2)
    own = tl.load(part + at[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    if cosines is None:
        return own
    turned = tl.load(part + opposite[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    turned = tl.where(d[None, :] < SIZE // 2, -turned, turned)
    cosine = tl.load(cosines + angle + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    sine = tl.load(sines + angle + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    return rounded(rounded(own * cosine, part) + rounded(turned * sine, part), part)


@triton.jit
def _normed(row, weight, epsilon, KIND: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    i = tl.arange(0, PADDED)
    values = tl.load(row + i, mask=i < SIZE, other=0.0).to(tl.float32)
    weights = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    return weighted(values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon), weights, row, KIND)


@triton.jit(do_not_specialize=["slots"])
def keep_latents(
    made,
    query_norm,
    key_norm,
    cosines,
    sines,
    low,
    keys,
    positions,
    slots,
    keys_block,
    keys_token,
    query_epsilon,
    key_epsilon,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    LOW_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Grid: (rows, 2 with a `query_norm`, else 1). Norm a row's latent, rotate the shared part of its key,
    and write both to the pool; padding rows write nothing. Norm its first LOW values to `low`.
    """
    row = tl.program_id(0).to(tl.int64)
    made += row * (LOW + LATENT + SHARED)
    if tl.program_id(1) == 1:
        i = tl.arange(0, LOW_PADDED)
        values = _normed(made, query_norm, query_epsilon, KIND, LOW, LOW_PADDED)
        tl.store(low + row * LOW + i, values.to(low.dtype.element_ty), mask=i < LOW)
        return
    slot = tl.load(slots + row)
    if slot < 0:
        return
    keys += slot // PAGE * keys_block + slot % PAGE * keys_token
    i, d = tl.arange(0, LATENT_PADDED), tl.arange(0, SHARED_PADDED)
    latent = _normed(made + LOW, key_norm, key_epsilon, KIND, LATENT, LATENT_PADDED)
    tl.store(keys + i, latent.to(keys.dtype.element_ty), mask=i < LATENT)
    part = made + LOW + LATENT + tl.zeros([1, 1], tl.int64)
    angle = tl.load(positions + row) * SHARED
    shared = _turned(part, angle, cosines, sines, SHARED, SHARED_PADDED, PAIRS)
    place = keys + LATENT + d[None, :]
    tl.store(place, shared.to(keys.dtype.element_ty), mask=(d < SHARED)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def multiply_heads(
    x,
    weight,
    out,
    cosines,
    sines,
    positions,
    num_rows,
    x_row,
    x_head,
    weight_head,
    weight_output,
    weight_input,
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid: (ROWS rows, HEADS, COLUMNS outputs; one more for SHARED). Multiply each head's part of a row by
    the head's own weight. The next SHARED values, rotated, follow its OUTPUTS values in `out`.
    """
    m, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    is_row = (m < num_rows)[:, None]
    m = tl.minimum(m, num_rows - 1).to(tl.int64)
    x += m[:, None] * x_row + head * x_head
    out += (m * HEADS + head)[:, None] * (OUTPUTS + SHARED)
    first = tl.program_id(2) * COLUMNS
    if SHARED > 0:
        is_rest = first >= OUTPUTS
        if is_rest:
            d = tl.arange(0, SHARED_PADDED)[None, :]
            angle = tl.load(positions + m)[:, None] * SHARED
            turned = _turned(x + INPUTS, angle, cosines, sines, SHARED, SHARED_PADDED, PAIRS)
            tl.store(out + OUTPUTS + d, turned.to(out.dtype.element_ty), mask=is_row & (d < SHARED))
            return
    n, k = first + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    is_output = (n < OUTPUTS)[None, :]
    weight += head * weight_head + n[None, :] * weight_output + k[:, None] * weight_input
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        inside = start + k < INPUTS
        inputs = tl.load(x + start + k[None, :], mask=is_row & inside[None, :], other=0.0)
        weights = tl.load(weight + start * weight_input, mask=is_output & inside[:, None], other=0.0)
        total = tl.dot(inputs, weights, total, input_precision="ieee")
    tl.store(out + n[None, :], total.to(out.dtype.element_ty), mask=is_row & is_output)


_ROWS = 64
_COLUMNS, _DEPTH = 32, 64

Turns = tuple[Tensor, Tensor] | tuple[None, None]
"""Cosines and sines [positions, rotated dims]; None if nothing is rotated."""


def attend_latents(
    mixer: LatentAttention, made: Tensor, inputs: StepInputs, backend: Any, slots: Tensor, turns: Turns
) -> Tensor:
    """Write the keys of the products' outputs `made` to the pool, attend, and return the heads' values."""
    to_latent: Any = mixer.to_latent
    to_value: Any = mixer.to_value
    _, latent, own = to_latent.weight.shape
    shared = mixer.head_dim - own
    low = made.shape[1] - latent - shared
    queries = made[:, :low]
    normed = _keep(mixer, made, inputs, backend, slots, turns, (low, latent, shared))
    if mixer.queries is not None:
        queries = mixer.queries(normed)
    query = made.new_empty((len(made), mixer.heads, latent + shared))
    queries = queries.unflatten(-1, (mixer.heads, -1))
    multiply(to_latent.weight, queries, query, inputs.positions, turns, mixer.in_pairs)
    attended = backend.attend(mixer.layer, query, AttentionOptions(mixer.scale))
    values = made.new_empty((len(made), mixer.heads, to_value.weight.shape[1]))
    multiply(to_value.weight, attended, values)
    return values.flatten(1)


def _keep(
    mixer: LatentAttention,
    made: Tensor,
    inputs: StepInputs,
    backend: Any,
    slots: Tensor,
    turns: Turns,
    sizes: tuple[int, int, int],
) -> Tensor:
    """Write the keys to the pool; return the normed input of the queries' product, if there is one."""
    low, latent, shared = sizes
    stored, norm = backend.layers[mixer.layer], mixer.query_norm
    normed = made.new_empty((len(made), low if norm is not None else 0))
    keep_latents[(len(made), 1 if norm is None else 2)](
        made,
        None if norm is None else norm.weight,
        mixer.key_norm.weight,
        *turns,
        normed,
        stored.pool[0],
        inputs.positions,
        slots,
        *stored.strides[:2],
        0.0 if norm is None else norm.epsilon,
        mixer.key_norm.epsilon,
        KIND=mixer.key_norm.kind.value,
        LOW=low,
        LOW_PADDED=power_of_two(low),
        LATENT=latent,
        LATENT_PADDED=power_of_two(latent),
        SHARED=shared,
        SHARED_PADDED=power_of_two(shared),
        PAIRS=mixer.in_pairs,
        PAGE=stored.block_size,
        num_warps=4,
    )
    return normed


def multiply(
    weight: Tensor,
    x: Tensor,
    out: Tensor,
    positions: Tensor | None = None,
    turns: Turns = (None, None),
    in_pairs: bool = False,
) -> None:
    """Multiply each head's first values in `x` [rows, heads, size] by its `weight` [heads, outputs, inputs].
    The rest of them, rotated, follows in `out`.
    """
    heads, outputs, size = weight.shape
    shared = x.shape[2] - size
    columns, depth = min(_COLUMNS, power_of_two(outputs)), min(_DEPTH, power_of_two(size))
    multiply_heads[(ceil_div(len(x), _ROWS), heads, ceil_div(outputs, columns) + (shared > 0))](
        x,
        weight,
        out,
        *turns,
        positions,
        len(x),
        *x.stride()[:2],
        *weight.stride(),
        HEADS=heads,
        INPUTS=size,
        OUTPUTS=outputs,
        SHARED=shared,
        SHARED_PADDED=power_of_two(shared),
        PAIRS=in_pairs,
        ROWS=_ROWS,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=4,
    )
