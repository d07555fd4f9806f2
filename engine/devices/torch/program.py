"""The torch executor of programs: any device and dtype, and the reference for the other executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.batch.runner import StepOperators
from engine.batch.step_inputs import StepInputs
from engine.devices.torch.operations import Operations, apply_norm, capped, multiplied, scaled, side_by_side
from engine.devices.torch.runner import TorchForward
from engine.devices.torch.transformers_hook import paged_attention
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import RecurrentLayer
from engine.lora.layers import add_adapters, begin_step
from engine.lora.table import Adapters
from engine.model.program import (
    Attention,
    HeadInput,
    LatentAttention,
    Layer,
    ModelProgram,
    Norm,
    Product,
    Rotation,
)

_Turns = tuple[Tensor, Tensor] | None
"""Cosines and sines of rows [rows, rotated dims]; None if heads are not rotated."""


class TorchProgram(nn.Module, Operations[_Turns]):
    """A program as a function of packed rows. Attention runs over the current backend's pool
    (`transformers_hook`) unless `attend` replaces it. `operators` run recurrent layers over states of the
    shapes in `recurrent`.
    """

    def __init__(
        self,
        program: ModelProgram,
        positions: int,
        hidden_layers: Sequence[int] = (),
        operators: StepOperators | None = None,
        recurrent: Sequence[RecurrentLayer] = (),
        attend: Callable[..., Tensor] = paged_attention,
        adapters: Adapters | None = None,
    ) -> None:
        """Make the executor. `hidden_layers` are captured, numbered like in Transformers' `hidden_states`."""
        super().__init__()
        self.program = program
        self._hidden_layers, self.adapters = hidden_layers, adapters
        self._runs_all = bool(hidden_layers) or adapters is not None
        """Whether the last layer's products run for all rows, as adapters' additions know only these."""
        self.operators, self.recurrent, self._attend_rows = operators, recurrent, attend
        made: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of a step's rows, by layer, for layers that share them."""
        mixers = (mixer for layer in program.layers for mixer in layer.mixers)
        self._sources = {mixer.source for mixer in mixers if isinstance(mixer, Attention)}
        self._tables: list[tuple[Tensor, Tensor] | None] = []
        """Cosines and sines for each layer's attention."""
        for layer in program.layers:
            attending = (each for each in layer.mixers if isinstance(each, Attention | LatentAttention))
            rotation = next((each.rotation for each in attending), None)
            if rotation is not None and rotation not in made:
                made[rotation] = rotation.tables(positions, program.embeddings)
            self._tables.append(None if rotation is None else made[rotation])

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of `logit_rows`, and the captured hidden states of all rows. A draft head reads
        the previous hidden states `before`, and returns the hidden states of `logit_rows` instead.
        """
        last, x, captured = self.states(token_ids, positions, logit_rows, before)
        scored = last[logit_rows] if self._runs_all else last
        logits = self.multiply(self.program.head, scored, None)
        if self.program.logits_divisor != 1:
            logits = logits / self.program.logits_divisor
        logits = capped(logits, self.program.logits_cap)
        if self.program.entry is not None:
            return logits, last if self.program.entry.feeds_normed else x
        if not self._hidden_layers:
            return logits, None
        return logits, torch.cat([captured[layer] for layer in self._hidden_layers], dim=-1)

    def states(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor | None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the last layer's normed output, its output, and all layers' inputs by number. The outputs
        are for all rows without `logit_rows`, with adapters or if hidden states are captured, else for
        `logit_rows`.
        """
        program, entry = self.program, self.program.entry
        x = scaled(embedding(token_ids, program.embeddings), program.embedding_multiplier)
        normed, vectors = None, None
        if program.token_vectors is not None:
            vectors = self.vectors_of(program.token_vectors, token_ids, x, None)
        if entry is not None:
            assert before is not None
            normed, x = _enter(entry, x, before)
            positions = (positions - 1).clamp(min=0)
        captured: dict[int, Tensor] = {}
        for number, layer in enumerate(program.layers):
            captured[number] = x
            is_last = number + 1 == len(program.layers) and not self._runs_all
            tables = self._tables[number]
            turns = None if tables is None else (tables[0][positions], tables[1][positions])
            x = self._layer(layer, x, normed, turns, logit_rows if is_last else None, vectors)
        self._kept.clear()
        last = x if program.final_norm is None else apply_norm(program.final_norm, x)
        captured[len(program.layers)] = last
        return last, x, captured

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        normed: Tensor | None,
        turns: _Turns,
        wanted: Tensor | None,
        vectors: Tensor | None,
    ) -> Tensor:
        """Return the layer's output for the rows `wanted` (None: all rows). `normed` is the mixers' input if
        it is not the norm of `x`. `turns` are the rows' cosines and sines, `vectors` those of their tokens.
        """
        factor = self.program.residual_multiplier
        if normed is None and layer.mixers:
            normed = x if layer.input_norm is None else apply_norm(layer.input_norm, x)
        mixed = []
        for mixer in layer.mixers:
            assert normed is not None
            mixed.append(self.mix(mixer, normed, turns))
        if wanted is not None:
            x, mixed = x[wanted], [rows[wanted] for rows in mixed]
            vectors = None if vectors is None else vectors[wanted]
        if mixed:
            outputs = [
                self.multiply(mixer.output, rows, turns)
                for mixer, rows in zip(layer.mixers, mixed, strict=True)
            ]
            made = sum(outputs[1:], outputs[0])
            x = x + scaled(made if layer.mixed_norm is None else apply_norm(layer.mixed_norm, made), factor)
        if layer.mlp_norm is None:
            return x
        normed = apply_norm(layer.mlp_norm, x)
        made = self.feed_forward(layer, normed, x, turns)
        x = x + scaled(made if layer.made_norm is None else apply_norm(layer.made_norm, made), factor)
        if layer.token_input is not None:
            assert vectors is not None
            part = layer.token_input
            x = x + apply_norm(part.norm, self.add_token(part, x, vectors[:, part.number], turns))
        return x if layer.multiplier is None else x * layer.multiplier

    def multiply(self, product: Product, x: Tensor, rows: _Turns) -> Tensor:
        x = product.enter(x)
        outputs = [linear(x) for linear in product.linears]
        if self.adapters is not None:
            for out, path in zip(outputs, product.paths, strict=False):  # the head has no paths
                add_adapters(out, x, path)
        return product.leave(multiplied(side_by_side(outputs), product.multipliers))

    def attend(self, mixer: Attention, made: Tensor, rows: _Turns) -> Tensor:
        queries, *sides = made.split(
            [mixer.query_size] + [mixer.kv_heads * mixer.head_dim] * mixer.sides, dim=-1
        )
        query = queries.unflatten(-1, (mixer.heads, -1))
        if mixer.is_gated:
            query, _ = query.chunk(2, dim=-1)
        query = _placed(query, mixer.query_norm, rows)
        if mixer.source is not None:
            key, value = self._kept[mixer.source]
        else:
            key, value = (side.unflatten(-1, (-1, mixer.head_dim)) for side in (sides[0], sides[-1]))
            key, value = _placed(key, mixer.key_norm, rows), _placed(value, mixer.value_norm, None)
        if mixer.layer in self._sources:
            self._kept[mixer.layer] = key, value
        return self._attend_rows(query, key, value, mixer.layer, mixer.scale, mixer.window, 0.0, mixer.sinks)

    def attend_latents(self, mixer: LatentAttention, made: Tensor, rows: _Turns) -> Tensor:
        _, latent, own = mixer.to_latent.weight.shape
        shared = mixer.head_dim - own
        queries, latents, keys = made.split([made.shape[-1] - latent - shared, latent, shared], dim=-1)
        if mixer.queries is not None:
            assert mixer.query_norm is not None
            queries = mixer.queries(apply_norm(mixer.query_norm, queries))
        plain, rest = queries.unflatten(-1, (mixer.heads, -1)).split([own, shared], dim=-1)
        keys = keys.unsqueeze(-2)
        if mixer.in_pairs:
            rest, keys = (part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in (rest, keys))
        query = torch.cat([mixer.to_latent(plain), _placed(rest, None, rows)], dim=-1)
        latents = apply_norm(mixer.key_norm, latents).unsqueeze(-2)
        key = torch.cat([latents, _placed(keys, None, rows)], dim=-1)
        out = self._attend_rows(query, key, key[..., :latent], mixer.layer, mixer.scale, 0, 0.0, None)
        values: Tensor = mixer.to_value(out)
        return values.flatten(1)


def _enter(entry: HeadInput, embeddings: Tensor, before: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the mixers' input, or None if it is the norm of the residual, and the residual."""
    normed = before if entry.hidden_norm is None else apply_norm(entry.hidden_norm, before)
    token = embeddings if entry.token_norm is None else apply_norm(entry.token_norm, embeddings)
    both = torch.cat([token, normed], dim=-1)
    if entry.joint is not None:
        return None, entry.joint(both)
    return both, normed if entry.normed_goes_on else before


def _placed(rows: Tensor, norm: Norm | None, turns: _Turns) -> Tensor:
    """Norm and rotate heads [..., heads, head_dim]."""
    rows = rows if norm is None else apply_norm(norm, rows)
    if turns is None:
        return rows
    cosines, sines = (each.unsqueeze(-2) for each in turns)
    turned, rest = rows.split([cosines.shape[-1], rows.shape[-1] - cosines.shape[-1]], dim=-1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-high, low], dim=-1) * sines
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class ProgramForward(TorchForward):
    def __init__(self, program: TorchProgram, backend: AttentionBackend) -> None:
        super().__init__(backend, program.adapters, program.operators)
        self._program = program
        described = program.program
        if described.entry is not None:
            self.no_hidden = described.embeddings.new_zeros((0, described.hidden_size))

    def _call(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        begin_step(self._additions)
        rows = inputs.token_ids, inputs.positions, inputs.logit_rows
        return self.compute(*rows) if inputs.hidden is None else self.compute(*rows, inputs.hidden)

    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs: tuple[Tensor, Tensor | None] = self._program(*inputs)
        return outputs
