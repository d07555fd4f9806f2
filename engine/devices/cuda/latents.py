"""Latent attention (`engine.devices.torch.latent_attention`) on a CUDA device: five launches, one of them for
the queries' second product. Rows have the same bits in every batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.batch.step_inputs import StepInputs
from engine.devices.cuda.latent_kernels import keep_latents, multiply_heads
from engine.kv.attention import AttentionOptions
from engine.model.program import LatentAttention
from engine.triton_support import ceil_div, power_of_two

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
