"""Runs a program by torch's operators: any device and dtype, and the reference for the other executors.

Values are rounded where Transformers' modules round them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, sigmoid, silu, softplus

from engine.batch.operators import StepOperators
from engine.batch.step_inputs import StepInputs
from engine.devices.torch.forward import TorchForward
from engine.devices.torch.transformers_hook import paged_attention
from engine.kv.attention import AttentionBackend
from engine.kv.state_layout import RecurrentLayer
from engine.model.program import (
    Activation,
    Attention,
    Entry,
    Experts,
    LatentAttention,
    Layer,
    Mixer,
    MixerKind,
    Mlp,
    ModelProgram,
    Norm,
    NormKind,
    Product,
    Recurrent,
    Rotation,
    Score,
)

_Turns = tuple[Tensor, Tensor] | None
"""Cosines and sines of rows [rows, rotated dims]; None: heads are not rotated."""

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.RELU2: lambda x: x.relu().square(),
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
}

_UNIT_EPSILON = 1e-6
"""The epsilon of the delta rule's unit norms, flash-linear-attention's."""


class TorchProgram(nn.Module):
    """A program as a function of packed rows. Attention runs over the current backend's pool
    (`transformers_hook`) unless `attend` replaces it, recurrent layers by `operators` over states of
    `recurrent` shapes.
    """

    def __init__(
        self,
        program: ModelProgram,
        positions: int,
        hidden_layers: Sequence[int] = (),
        operators: StepOperators | None = None,
        recurrent: Sequence[RecurrentLayer] = (),
        attend: Callable[..., Tensor] = paged_attention,
    ) -> None:
        """`hidden_layers` are captured, numbered as in Transformers' `hidden_states`."""
        super().__init__()
        self.program = program
        self._hidden_layers = hidden_layers
        self.operators, self._recurrent, self._attend_rows = operators, recurrent, attend
        made: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._tables: list[tuple[Tensor, Tensor] | None] = []
        """Cosines and sines of each layer's attention."""
        for layer in program.layers:
            rotation = next((each.rotation for each in layer.mixers if isinstance(each, Attention)), None)
            if rotation is not None and rotation not in made:
                made[rotation] = rotation.tables(positions, program.embeddings)
            self._tables.append(None if rotation is None else made[rotation])

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of `logit_rows`, and the captured hidden states of all rows. A draft head takes the
        hidden states `before` the rows, and returns those after `logit_rows` instead.
        """
        last, x, captured = self.states(token_ids, positions, logit_rows, before)
        scored = last[logit_rows] if self._hidden_layers else last
        logits = _multiply(self.program.head, scored)
        if self.program.logits_divisor != 1:
            logits = logits / self.program.logits_divisor
        if self.program.entry is not None:
            return logits, last if self.program.entry.feeds_normed else x
        if not self._hidden_layers:
            return logits, None
        return logits, torch.cat([captured[layer] for layer in self._hidden_layers], dim=-1)

    def states(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor | None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the normed output of the last layer, its output, and the input of each layer. Without
        `logit_rows`, or where hidden states are captured, the outputs are those of all rows.
        """
        program, entry = self.program, self.program.entry
        x = _scaled(embedding(token_ids, program.embeddings), program.embedding_multiplier)
        normed = None
        if entry is not None:
            assert before is not None
            normed, x = _enter(entry, x, before)
            positions = (positions - 1).clamp(min=0)
        captured: dict[int, Tensor] = {}
        for number, layer in enumerate(program.layers):
            captured[number] = x
            is_last = number + 1 == len(program.layers) and not self._hidden_layers
            tables = self._tables[number]
            turns = None if tables is None else (tables[0][positions], tables[1][positions])
            x = self._layer(layer, x, normed, turns, logit_rows if is_last else None)
        last = x if program.final_norm is None else _norm(program.final_norm, x)
        captured[len(program.layers)] = last
        return last, x, captured

    def _layer(
        self, layer: Layer, x: Tensor, normed: Tensor | None, turns: _Turns, wanted: Tensor | None
    ) -> Tensor:
        """Return the layer's output of the `wanted` rows (None: all). `normed`: the mixers' input, where it
        is not the norm of `x`. `turns`: the rows' cosines and sines.
        """
        factor = self.program.residual_multiplier
        if normed is None and layer.mixers:
            normed = x if layer.input_norm is None else _norm(layer.input_norm, x)
        mixed = []
        for mixer in layer.mixers:
            assert normed is not None
            mixed.append(self._mix(mixer, _scaled(normed, mixer.input_multiplier), turns))
        if wanted is not None:
            x, mixed = x[wanted], [rows[wanted] for rows in mixed]
        if mixed:
            outputs = [_multiply(mixer.output, rows) for mixer, rows in zip(layer.mixers, mixed, strict=True)]
            made = sum(outputs[1:], outputs[0])
            x = x + _scaled(made if layer.mixed_norm is None else _norm(layer.mixed_norm, made), factor)
        if layer.mlp_norm is None:
            return x
        normed = _norm(layer.mlp_norm, x)
        made = None if layer.mlp is None else _mlp(layer.mlp, normed)  # type: ignore[assignment]
        if layer.experts is not None:
            made = _experts(layer.experts, normed, made)
        if made is None:
            return x
        return x + _scaled(made if layer.made_norm is None else _norm(layer.made_norm, made), factor)

    def _mix(self, mixer: Mixer, normed: Tensor, turns: _Turns) -> Tensor:
        made = _multiply(mixer.inputs, normed)
        if isinstance(mixer, Attention):
            return self._attend(mixer, made, turns)
        if isinstance(mixer, LatentAttention):
            return _attend_latents(mixer, made)
        assert isinstance(mixer, Recurrent)
        if mixer.kind is MixerKind.SHORT_CONV:
            inner, outer, rows = made.chunk(3, dim=-1)
            return outer * self._convolve(mixer, inner * rows).to(made.dtype)
        if mixer.kind is MixerKind.STATE_SPACE:
            return self._scan(mixer, made)
        return self._apply_delta_rule(mixer, made, normed)

    def _attend(self, mixer: Attention, made: Tensor, turns: _Turns) -> Tensor:
        own = mixer.heads * mixer.head_dim * (2 if mixer.is_gated else 1)
        others = (made.shape[-1] - own) // 2
        queries, keys, value = made.split([own, others, others], dim=-1)
        query, key, value = (
            rows.unflatten(-1, (count, -1))
            for rows, count in (
                (queries, mixer.heads),
                (keys, others // mixer.head_dim),
                (value, others // mixer.head_dim),
            )
        )
        gate = None
        if mixer.is_gated:
            query, gate = query.chunk(2, dim=-1)
        query, key = _placed(query, mixer.query_norm, turns), _placed(key, mixer.key_norm, turns)
        out = self._attend_rows(query, key, value, mixer.layer, mixer.scale, mixer.window, 0.0)
        return (out if gate is None else out * sigmoid(gate)).flatten(-2)

    def _convolve(self, mixer: Recurrent, rows: Tensor) -> Tensor:
        assert self.operators is not None
        return self.operators.causal_conv(mixer.number, rows, mixer.taps, mixer.bias)

    def _apply_delta_rule(self, mixer: Recurrent, made: Tensor, normed: Tensor) -> Tensor:
        """A gated delta net, with decays of heads or of their keys' channels."""
        assert self.operators is not None and mixer.gates and mixer.norm
        assert mixer.rates is not None and mixer.shifts is not None
        shape, gates = self._recurrent[mixer.number], _multiply(mixer.gates, normed)
        heads, keys = shape.num_heads, shape.num_key_heads * shape.key_dim
        if mixer.is_interleaved:
            each = heads // shape.num_key_heads
            values = each * shape.value_dim
            made = _sorted_heads(made, shape.num_key_heads, [shape.key_dim] * 2 + [values] * 2)
            gates = _sorted_heads(gates, shape.num_key_heads, [each, each])
        rows = silu(self._convolve(mixer, made[:, : shape.channels])).to(made.dtype).float()
        query, key = (
            _unit(part.unflatten(-1, (-1, shape.key_dim))) for part in rows[:, : 2 * keys].chunk(2, dim=-1)
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
        out, opening = _norm(mixer.norm, read.to(made.dtype)), opening.float().unflatten(-1, (heads, -1))
        if mixer.decays is None:
            return (out * silu(opening)).to(made.dtype).flatten(1)
        exact = _normalized(read.to(made.dtype), mixer.norm) * mixer.norm.weight.float()
        return (exact * sigmoid(opening)).to(made.dtype).flatten(1)

    def _scan(self, mixer: Recurrent, made: Tensor) -> Tensor:
        """Mamba 2's state space: linear attention without the delta rule."""
        assert self.operators is not None
        assert mixer.rates is not None and mixer.shifts is not None and mixer.skips is not None
        shape, dtype = self._recurrent[mixer.number], made.dtype
        width, keys = shape.num_heads * shape.value_dim, shape.num_key_heads * shape.key_dim
        gate, inputs, times = made.split([width, shape.channels, shape.num_heads], dim=-1)
        rows = silu(self._convolve(mixer, inputs)).to(dtype).float()
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
        out = _normalized(out.unflatten(-1, (-1, mixer.group)), mixer.norm).flatten(1)
        out = out * mixer.norm.weight.float()
        return (out * opening if mixer.norms_first else out).to(dtype)


def _enter(entry: Entry, embeddings: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's input, and the residual stream."""
    if entry.joint is not None:
        joined: Tensor = entry.joint(torch.cat([embeddings, before], dim=-1))
        return joined, joined
    assert entry.token_norm is not None and entry.hidden_norm is not None
    normed = _norm(entry.hidden_norm, before)
    joined = torch.cat([_norm(entry.token_norm, embeddings), normed], dim=-1)
    return joined, normed if entry.normed_goes_on else before


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _multiply(product: Product, x: Tensor) -> Tensor:
    outputs = [linear(x) for linear in product.linears]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    if product.multipliers is None:
        return out
    return (out.float() * product.multipliers.to(out.device)).to(out.dtype)


def _normalized(x: Tensor, norm: Norm) -> Tensor:
    """Return the rows with a root mean square of one, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.epsilon)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    normalized = _normalized(x, norm)
    if norm.kind is NormKind.PLAIN:
        return norm.weight * normalized.to(x.dtype)
    weight = norm.weight.float() + (1 if norm.kind is NormKind.CENTRED else 0)
    return (weight * normalized).to(x.dtype)


def _placed(rows: Tensor, norm: Norm | None, turns: _Turns) -> Tensor:
    """Norm and rotate heads [..., heads, head_dim]."""
    rows = rows if norm is None else _norm(norm, rows)
    if turns is None:
        return rows
    cosines, sines = (each.unsqueeze(-2) for each in turns)
    turned, rest = rows.split([cosines.shape[-1], rows.shape[-1] - cosines.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-high, low], dim=-1) * sines
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _attend_latents(mixer: LatentAttention, made: Tensor) -> Tensor:
    _, latent, own = mixer.to_latent.weight.shape  # type: ignore[union-attr,misc]
    shared = mixer.head_dim - own
    queries, latents, keys = made.split([made.shape[-1] - latent - shared, latent, shared], dim=-1)
    if mixer.queries is not None:
        assert mixer.query_norm is not None
        queries = mixer.queries(_norm(mixer.query_norm, queries))
    plain, rest = queries.unflatten(-1, (mixer.heads, -1)).split([own, shared], dim=-1)
    query = torch.cat([mixer.to_latent(plain), rest], dim=-1)
    key = torch.cat([_norm(mixer.key_norm, latents), keys], dim=-1).unsqueeze(1)
    out = paged_attention(query, key, key[..., :latent], mixer.layer, mixer.scale, 0, 0.0)
    values: Tensor = mixer.to_value(out)
    return values.flatten(1)


def _activate(made: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    gate, values = made.chunk(2, dim=-1) if is_gated else (made, None)
    active = _ACTIVATIONS[activation](gate)
    return active if values is None else active * values


def _mlp(mlp: Mlp, normed: Tensor) -> Tensor:
    return _multiply(mlp.down, _activate(_multiply(mlp.gate_up, normed), mlp.activation, mlp.is_gated))


def _experts(experts: Experts, normed: Tensor, beside: Tensor | None) -> Tensor:
    """Return the experts' output, plus the output of the MLP `beside` them."""
    chosen, weights = _route(experts, normed)
    out: Tensor = experts.holder.experts(
        normed, chosen, weights.to(normed.dtype) if experts.rounds else weights
    )
    if beside is None:
        return out
    if experts.opener is not None:
        beside = beside * sigmoid(_multiply(experts.opener, normed))
    return beside + out


def _route(experts: Experts, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' experts [rows, chosen], and how much each counts, in float32."""
    if experts.is_exact:
        logits = normed.float() @ experts.router.float().t()
    else:
        logits = (normed @ experts.router.t()).float()
    if experts.score is Score.SOFTMAX:
        scores = logits.softmax(-1)
    else:
        scores = sigmoid(logits)
        scores = scores.to(normed.dtype).float() if experts.rounds else scores
    ranks = scores if experts.preferences is None else scores + experts.preferences.float()
    if experts.open_groups < experts.groups:
        grouped = ranks.unflatten(-1, (experts.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.open_groups, dim=-1).indices
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        ranks = grouped.masked_fill(is_closed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = ranks.topk(experts.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + experts.least_sum)
    return chosen, weights * experts.scaling


def _sorted_heads(rows: Tensor, heads: int, sizes: Sequence[int]) -> Tensor:
    """Rows of heads with parts of these sizes, as all heads' first parts, then all second ones, and so on."""
    parts = rows.unflatten(-1, (heads, -1)).split([*sizes], dim=-1)
    return torch.cat([part.flatten(1) for part in parts], dim=-1)


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _UNIT_EPSILON)


class ProgramForward(TorchForward):
    """A program, a draft head's among them."""

    def __init__(self, program: TorchProgram, backend: AttentionBackend) -> None:
        super().__init__(backend, operators=program.operators)
        self._program = program
        described = program.program
        if described.entry is not None:
            self.no_hidden = described.embeddings.new_zeros((0, described.hidden_size))

    def _call(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        rows = inputs.token_ids, inputs.positions, inputs.logit_rows
        return self.compute(*rows) if inputs.hidden is None else self.compute(*rows, inputs.hidden)

    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs: tuple[Tensor, Tensor | None] = self._program(*inputs)
        return outputs
