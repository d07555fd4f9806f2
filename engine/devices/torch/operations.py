"""A program's operations in torch, for executors that multiply and attend in their own way.

Values are rounded where Transformers' modules round them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, sigmoid, silu, softplus

from engine.batch.runner import StepOperators
from engine.kv.state_slots import RecurrentLayer
from engine.model.program import (
    Activation,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mixer,
    MixerKind,
    Mlp,
    Norm,
    NormKind,
    Product,
    Recurrent,
    Score,
    TokenInput,
    TokenVectors,
)

Rows = TypeVar("Rows")
"""The data of a step that products and attention read in addition to the rows' values."""

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.RELU2: lambda x: x.relu().square(),
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
}

UNIT_EPSILON = 1e-6
"""Epsilon of the delta rule's unit norms, from flash-linear-attention."""


class Operations(ABC, Generic[Rows]):
    """The mixers, MLPs and experts of layers. `operators` run recurrent layers of the shapes `recurrent`."""

    operators: StepOperators | None
    recurrent: Sequence[RecurrentLayer]

    @abstractmethod
    def attend(self, mixer: Attention, made: Tensor, rows: Rows) -> Tensor:
        """Return [rows, heads, value_dim] before the gate, from the products' outputs `made`."""

    @abstractmethod
    def attend_latents(self, mixer: LatentAttention, made: Tensor, rows: Rows) -> Tensor:
        """Return [rows, heads * value_dim] from the products' outputs `made`."""

    @abstractmethod
    def multiply(self, product: Product, x: Tensor, rows: Rows) -> Tensor:
        """Return whole outputs of a product."""

    def activate(self, made: Tensor, activation: Activation, is_gated: bool) -> Tensor:
        gate, values = made.chunk(2, dim=-1) if is_gated else (made, None)
        active = _ACTIVATIONS[activation](gate)
        return active if values is None else active * values

    def mix(self, mixer: Mixer, normed: Tensor, rows: Rows) -> Tensor:
        """Return the input of the mixer's output product."""
        normed = scaled(normed, mixer.input_multiplier)
        made = self.multiply(mixer.inputs, normed, rows)
        if isinstance(mixer, Attention):
            attended = self.attend(mixer, made, rows)
            return (self.open_heads(mixer, attended, made) if mixer.is_gated else attended).flatten(-2)
        if isinstance(mixer, LatentAttention):
            return self.attend_latents(mixer, made, rows)
        assert isinstance(mixer, Recurrent)
        if mixer.kind is MixerKind.SHORT_CONV:
            inner, outer, values = made.chunk(3, dim=-1)
            return outer * self._convolve(mixer, inner * values).to(made.dtype)
        if mixer.kind is MixerKind.STATE_SPACE:
            return self.scan_states(mixer, made)
        return self.apply_delta_rule(mixer, made, normed, rows)

    def open_heads(self, mixer: Attention, attended: Tensor, made: Tensor) -> Tensor:
        """Return what heads attended to, times the sigmoid of the gates, each of which follows its query."""
        queries = made[..., : 2 * mixer.heads * mixer.head_dim].unflatten(-1, (mixer.heads, 2, -1))
        return attended * sigmoid(queries[..., 1, :])

    def feed_forward(self, layer: Layer, normed: Tensor, residual: Tensor, rows: Rows) -> Tensor:
        """Return the sum of the outputs of a layer's MLP and experts. `normed` is the norm of `residual`."""
        made = None if layer.mlp is None else self._mlp(layer.mlp, normed, rows)
        if layer.experts is None:
            assert made is not None
            return made
        norms = layer.experts.norms
        if norms is None:
            return self._experts(layer.experts, normed, normed, made, rows)
        assert made is not None
        scored, read = apply_norm(norms.router, residual), apply_norm(norms.read, residual)
        out = self._experts(layer.experts, scored, read, None, rows)
        return apply_norm(norms.beside, made) + apply_norm(norms.made, out)

    def vectors_of(self, vectors: TokenVectors, token_ids: Tensor, x: Tensor, rows: Rows) -> Tensor:
        """Return the rows' vectors [rows, layers, size]; `x` are their embeddings."""
        made = self.multiply(vectors.product, x, rows) * vectors.factor
        normed = apply_norm(vectors.norm, made.unflatten(-1, (-1, vectors.size)))
        own = embedding(token_ids, vectors.embeddings) * vectors.multiplier
        return (normed + own.unflatten(-1, (-1, vectors.size))) * vectors.sum_factor

    def add_token(self, part: TokenInput, x: Tensor, vectors: Tensor, rows: Rows) -> Tensor:
        """Return the output of a layer's `TokenInput` before its norm. `vectors` are [rows, size]."""
        gates = self.activate(self.multiply(part.gate, x, rows), part.activation, is_gated=False)
        return self.multiply(part.output, gates * vectors, rows)

    def _mlp(self, mlp: Mlp, normed: Tensor, rows: Rows) -> Tensor:
        made = self.multiply(mlp.gate_up, normed, rows)
        return self.multiply(mlp.down, self.activate(made, mlp.activation, mlp.is_gated), rows)

    def _experts(
        self, experts: Experts, scored: Tensor, normed: Tensor, beside: Tensor | None, rows: Rows
    ) -> Tensor:
        """Return the experts' output plus the parallel MLP's output `beside`. The router reads `scored`."""
        chosen, weights = _route(experts, router_logits(experts, scored), normed.dtype)
        weights = weights.to(normed.dtype) if experts.rounds else weights
        out: Tensor = experts.holder.experts(normed, chosen, weights)
        if beside is None:
            return out
        if experts.shared_gate is not None:
            beside = beside * sigmoid(self.multiply(experts.shared_gate, normed, rows))
        return beside + out

    def _convolve(self, mixer: Recurrent, rows: Tensor) -> Tensor:
        assert self.operators is not None
        return self.operators.causal_conv(mixer.number, rows, mixer.taps, mixer.bias)

    def apply_delta_rule(self, mixer: Recurrent, made: Tensor, normed: Tensor, step: Rows) -> Tensor:
        """Run a gated delta net with a decay for each head or each of its key channels."""
        assert self.operators is not None and mixer.gates and mixer.norm
        assert mixer.rates is not None and mixer.shifts is not None
        shape, gates = self.recurrent[mixer.number], self.multiply(mixer.gates, normed, step)
        heads, keys = shape.num_heads, shape.num_key_heads * shape.key_dim
        if mixer.is_interleaved:
            each = heads // shape.num_key_heads
            values = each * shape.value_dim
            made = _sorted_heads(made, shape.num_key_heads, [shape.key_dim] * 2 + [values] * 2)
            gates = _sorted_heads(gates, shape.num_key_heads, [each, each])
        rows = _activated(self._convolve(mixer, made[:, : shape.channels]), made.dtype)
        query, key = (
            unit(part.unflatten(-1, (-1, shape.key_dim))) for part in rows[:, : 2 * keys].chunk(2, dim=-1)
        )
        value = rows[:, 2 * keys :].unflatten(-1, (heads, -1))
        beta = sigmoid(gates[:, :heads]).float()
        if mixer.decays is None:
            decay, opening = gates[:, heads:], made[:, shape.channels :]
        else:
            assert mixer.opening is not None
            low, other = gates[:, heads:].split([mixer.decays.in_features, mixer.opening.in_features], dim=-1)
            decay, opening = mixer.decays(low), mixer.opening(other)
        decay = softplus(decay.float() + mixer.shifts.float().flatten()).unflatten(-1, (heads, -1))
        decay = mixer.rates.view(-1, 1) * decay
        read = self.operators.linear_attention(
            mixer.number, query * shape.key_dim**-0.5, key, value, decay, beta
        )
        opening = opening.unflatten(-1, (heads, -1))
        read, opened = read.to(opening.dtype), opening.float()
        if mixer.decays is None:
            out = apply_norm(mixer.norm, read) * silu(opened)
        else:
            out = _normed_exactly(mixer.norm, read) * sigmoid(opened)
        return out.to(opening.dtype).flatten(1)

    def scan_states(self, mixer: Recurrent, made: Tensor) -> Tensor:
        """Run Mamba 2's state space: linear attention without the delta rule."""
        assert self.operators is not None
        assert mixer.rates is not None and mixer.shifts is not None and mixer.skips is not None
        shape, dtype = self.recurrent[mixer.number], made.dtype
        width, keys = shape.num_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
        gate, inputs, times = made.split([width, shape.channels, shape.num_heads], dim=-1)
        rows = _activated(self._convolve(mixer, inputs), dtype)
        value = rows[:, :width].unflatten(-1, (shape.num_heads, -1))
        key, query = (
            part.unflatten(-1, (-1, shape.key_dim)) for part in rows[:, width:].split([keys, keys], dim=-1)
        )
        times = softplus(times + mixer.shifts.to(dtype)).clamp(mixer.shortest, mixer.longest).float()
        times = times.unsqueeze(-1)
        read = self.operators.linear_attention(
            mixer.number, query, key, value * times, mixer.rates.view(-1, 1) * times, None
        )
        out = (read + mixer.skips.float().view(-1, 1) * value).flatten(1)
        if mixer.norm is None:
            return (out * silu(gate)).to(dtype)
        opening = silu(gate.float())
        out = out if mixer.norms_first else out * opening
        out = _normed_exactly(mixer.norm, out.unflatten(-1, (-1, mixer.group))).flatten(1)
        return (out * opening if mixer.norms_first else out).to(dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def side_by_side(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat([*outputs], dim=-1)


def capped(values: Tensor, cap: float) -> Tensor:
    """Return softly capped logits or scores; cap 0 is none."""
    return torch.tanh(values / cap) * cap if cap else values


def multiplied(out: Tensor, multipliers: Tensor | None) -> Tensor:
    """Return a product's outputs times its multipliers, if any."""
    return out if multipliers is None else (out.float() * multipliers.to(out.device)).to(out.dtype)


def _normalized(x: Tensor, norm: Norm) -> Tensor:
    """Return the rows with root mean square 1, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.epsilon)


def _normed_exactly(norm: Norm, rows: Tensor) -> Tensor:
    """Norm rows [rows, groups, size] in float32. Groups have weights of their own, or all the same."""
    return _normalized(rows, norm) * norm.weight.float().view(-1, rows.shape[-1])


def _activated(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return SiLU of rows, rounded to `dtype`, in float32."""
    return silu(rows).to(dtype).float()


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    normalized = _normalized(x, norm)
    if norm.kind is NormKind.PLAIN:
        return norm.weight * normalized.to(x.dtype)
    weight = norm.weight.float() + (1 if norm.kind is NormKind.CENTRED else 0)
    return (weight * normalized).to(x.dtype)


def router_logits(experts: Experts, normed: Tensor) -> Tensor:
    if experts.is_exact:
        return normed.float() @ experts.router.float().t()
    return linear(normed, experts.router, experts.router_bias)


def _route(experts: Experts, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows' experts [rows, chosen], and their weights, in float32."""
    if experts.score is Score.SOFTMAX:
        scores = logits.float().softmax(-1)
    elif experts.score is Score.CHOSEN_SOFTMAX:
        scores = logits.float()
    else:
        scores = sigmoid(logits.float())
        scores = scores.to(dtype).float() if experts.rounds else scores
    ranks = scores if experts.preferences is None else scores + experts.preferences.float()
    if experts.open_groups < experts.groups:
        grouped = ranks.unflatten(-1, (experts.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.open_groups, dim=-1).indices
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        ranks = grouped.masked_fill(is_closed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranks.topk(experts.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.score is Score.CHOSEN_SOFTMAX:
        weights = weights.softmax(-1)
    if experts.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + experts.least_sum)
    weights = weights * experts.scaling
    return chosen, weights if experts.factors is None else weights * experts.factors[chosen].float()


def _sorted_heads(rows: Tensor, heads: int, sizes: Sequence[int]) -> Tensor:
    """Reorder rows from head by head, with parts of these sizes, to part by part, with all heads in each."""
    parts = rows.unflatten(-1, (heads, -1)).split([*sizes], dim=-1)
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


def unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + UNIT_EPSILON)
