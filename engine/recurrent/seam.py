"""Puts our operators in place of the functions over tokens that a model's recurrent layers call.

Each such layer gets a forward of its own: the same code, with other functions under these names. So its
projections, gates and norms stay Transformers', no other model in the process notices, and every call knows
its layer.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from engine.errors import UnsupportedModelError
from engine.recurrent.operators import Operators

_EPSILON = 1e-6
"""Of the L2 norm of queries and keys (flash-linear-attention's)."""


class Seam:
    """The recurrent layers of a model, and what runs in them. Without `operators` Transformers' own functions
    run, as in an untouched model.
    """

    def __init__(self) -> None:
        self.layers: list[int] = []
        """The number in the model of each."""
        self.operators: Operators | None = None


def hook(model: nn.Module) -> Seam | None:
    """None for a model that calls none of these functions."""
    seam = Seam()
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, types.FunctionType) or forward.__closure__ is not None:
            continue
        names = [name for name in _BOUND if name in forward.__code__.co_names]
        number = getattr(module, "layer_idx", None)
        if not names or number is None:
            continue
        known = dict(forward.__globals__)
        for name in names:
            known[name] = _BOUND[name](seam, len(seam.layers), known[name])
        own = types.FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__)
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = types.MethodType(own, module)
        seam.layers.append(number)
    return seam if seam.layers else None


def _bound_conv(seam: Seam, layer: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if seam.operators is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        rows = seam.operators.causal_conv(layer, _only(hidden_states).t(), weight, bias)
        if activation is not None:
            rows = ACT2FN[activation](rows)
        return rows.to(hidden_states.dtype).t()[None]

    return causal_conv1d_fn


def _bound_delta_rule(seam: Seam, layer: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule, with a decay for each head (Gated DeltaNet, 2024) or each of its key's channels
    (Kimi Delta Attention, 2025).
    """

    def chunk_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if seam.operators is None:
            return original(
                query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs
            )
        q, k, v, decay, strength = (_only(rows).float() for rows in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON) for rows in (q, k))
        decay = decay if decay.dim() == 3 else decay[..., None]
        out = seam.operators.linear_attention(layer, q * q.shape[-1] ** -0.5, k, v, decay, strength)
        return out[None].to(query.dtype), None

    return chunk_delta_rule


def _bound_state_space(seam: Seam, layer: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba2's scan (2024): linear attention with C as queries, B as keys and no delta rule."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Any:
        if seam.operators is None:
            options = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return original(hidden_states, dt, A, B, C, chunk_size, **options, **kwargs)
        if z is not None:
            raise UnsupportedModelError("a gate inside of the scan (z) is not supported")
        times = _only(dt) if dt_bias is None else _only(dt) + dt_bias.to(dt.dtype)
        times = (softplus(times) if dt_softplus else times).clamp(*dt_limit).float()
        rows = _only(hidden_states).float()
        query, key = _only(C).float(), _only(B).float()
        times = times[..., None]
        out = seam.operators.linear_attention(layer, query, key, rows * times, A[:, None] * times, None)
        return (out if D is None else out + D[:, None] * rows)[None]

    return mamba2_chunk_scan


def _only(batch: Tensor) -> Tensor:
    if batch.shape[0] != 1:
        raise UnsupportedModelError(
            f"rows must be packed as [1, total_tokens], got a batch of {batch.shape[0]}"
        )
    return batch[0]


_BOUND = {
    "causal_conv1d_fn": _bound_conv,
    "torch_chunk_gated_delta_rule": _bound_delta_rule,
    "chunk_kimi_delta_attention": _bound_delta_rule,
    "mamba2_chunk_scan": _bound_state_space,
}
