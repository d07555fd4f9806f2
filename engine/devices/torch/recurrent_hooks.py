"""Our operators in place of the functions over tokens that a model's recurrent layers call.

Each such layer gets its own forward: the same code, with other functions under these names. So projections,
gates and norms remain Transformers', other models are unaffected, and every call knows its layer.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.functional import sigmoid, silu, softplus
from transformers.activations import ACT2FN

from engine.batch.runner import Operators
from engine.devices.torch.operations import unit
from protocol.errors import UnsupportedModelError

_ADVISER = "transformers.integrations.hub_kernels"
"""The logger that warns of slow functions, which run here only while a model is probed."""
_Ours: TypeAlias = Callable[..., Any]


class RecurrentHooks:
    """A model's recurrent layers and their operators. Without these, Transformers' functions run."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        """Each recurrent layer's index in the model."""
        self.operators: Operators | None = None

    def add(self, module: Any) -> None:
        """Number a layer. Copies of it in models with fewer layers keep the number."""
        module.recurrent_number = len(self.layers)
        self.layers.append(module.layer_idx)


def hook(model: nn.Module) -> RecurrentHooks | None:
    """Hook a model's recurrent layers. Return None if the model calls none of these functions."""
    hooks = RecurrentHooks()
    for module in model.modules():
        if type(module).__name__ == _LIGHTNING_LAYER:
            own = _bound(hooks, len(hooks.layers), type(module).forward, _lightning)
            module.forward = types.MethodType(own, module)
            hooks.add(module)
            continue
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, types.FunctionType) or forward.__closure__ is not None:
            continue
        names = [name for name in _OURS if name in forward.__code__.co_names]
        number = getattr(module, "layer_idx", None)
        if not names or number is None:
            continue
        known = dict(forward.__globals__)
        for name in names:
            ours = _OURS[name]
            if ours is _delta_rule:
                ours = partial(_delta_rule, num_key_heads=getattr(module, "num_k_heads", None))
            known[name] = _bound(hooks, len(hooks.layers), known[name], ours)
        copy = types.FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__)
        copy.__kwdefaults__ = forward.__kwdefaults__
        module.forward = types.MethodType(copy, module)
        if _SCAN in names and hasattr(module, "dt_proj"):
            module.dt_proj = TimeProjection(module.dt_proj)
        hooks.add(module)
    if not hooks.layers:
        return None
    logging.getLogger(_ADVISER).setLevel(logging.ERROR)
    return hooks


def _bound(
    hooks: RecurrentHooks, layer: int, original: Callable[..., Any], ours: _Ours
) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if hooks.operators is None:
            return original(*args, **kwargs)
        return ours(hooks.operators, layer, *args, **kwargs)

    return function


def _conv(
    operators: Operators,
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    rows = operators.causal_conv(layer, _only(hidden_states).t(), weight, bias)
    if activation is not None:
        rows = ACT2FN[activation](rows)
    return rows.to(hidden_states.dtype).t()[None]


def _delta_rule(
    operators: Operators,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    num_key_heads: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run the gated delta rule, with decays of heads (2024) or key channels (Kimi, 2025)."""
    if num_key_heads is not None:  # Transformers 5.17 repeats each for the value heads that share it
        query, key = (each[:, :, :: each.shape[2] // num_key_heads].contiguous() for each in (query, key))
    q, k, v, decay, strength = (_only(rows).float() for rows in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    decay = decay if decay.dim() == 3 else decay[..., None]
    out = operators.linear_attention(layer, q * q.shape[-1] ** -0.5, k, v, decay, strength)
    return out[None].to(query.dtype), None


def _state_space(
    operators: Operators,
    layer: int,
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
    **_: Any,
) -> Tensor:
    """Run Mamba2's scan (2024): linear attention with C as queries, B as keys and no delta rule."""
    if z is not None:
        raise UnsupportedModelError("a gate inside of the scan (z) is not supported")
    times = _only(dt) if dt_bias is None else _only(dt) + dt_bias.to(dt.dtype)
    times = (softplus(times) if dt_softplus else times).clamp(*dt_limit).float()[..., None]
    rows, query, key = (_only(each).float() for each in (hidden_states, C, B))
    out = operators.linear_attention(layer, query, key, rows * times, A[:, None] * times, None)
    return (out if D is None else out + D[:, None] * rows)[None]


def _scan(
    operators: Operators,
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Run Mamba's selective scan (2023): a state of `A.shape[1]` values for each channel."""
    times = _only(dt).t() if delta_bias is None else _only(dt).t() + delta_bias.to(dt.dtype)
    times = (softplus(times) if delta_softplus else times).float()
    rows, query, key = (_only(each).t().float() for each in (hidden_states, C, B))
    out = operators.selective_scan(layer, query, key, rows * times, times, A.float())
    out = out if D is None else out + rows * D
    return (out if z is None else out * silu(_only(z).t())).t()[None]


def _lightning(
    operators: Operators, layer: int, module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Run a layer of lightning attention (2024): linear attention with a constant decay for each head. The
    layer calls no function over tokens, so we replace its whole forward.
    """
    states = _only(module.act_fn(module.qkv_proj(hidden_states))).unflatten(-1, (-1, 3 * module.head_dim))
    query, key, value = states.float().chunk(3, dim=-1)
    decay = -module.slope_rate.float().view(1, -1, 1).expand(len(states), -1, 1)
    out = operators.linear_attention(layer, query, key, value, decay, None)
    rows = module.norm(out.to(hidden_states.dtype).flatten(1)[None])
    return module.out_proj(sigmoid(module.output_gate(hidden_states)) * rows), None


class TimeProjection(nn.Module):
    """A linear layer whose caller multiplies by `weight` and adds `bias` by itself. As a layer, it can be
    packed, so that its rows have the same bits in every batch.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        linear.bias = None
        self.linear = linear

    @property
    def weight(self) -> TimeProjection:
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        rows: Tensor = self(columns.transpose(1, 2))
        return rows.transpose(1, 2)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.linear(rows)
        return result


def _only(batch: Tensor) -> Tensor:
    if batch.shape[0] != 1:
        raise UnsupportedModelError(
            f"rows must be packed as [1, total_tokens], got a batch of {batch.shape[0]}"
        )
    return batch[0]


_SCAN, _LIGHTNING_LAYER = "mamba_selective_scan", "MiniMaxLightningAttention"
_OURS: dict[str, _Ours] = {
    _SCAN: _scan,
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""Our functions in place of those with these names. They get the operators and the layer's number first."""
