"""The decoder of programs on a CUDA device: cuBLAS or our kernels multiply, Triton does most of the rest.

Operations without a kernel of their own run by torch's operators. No operation waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from engine.batch.step_inputs import StepInputs
from engine.devices.attention import by_table, capturable
from engine.devices.cuda.experts import Router, TiledExperts
from engine.devices.cuda.joined_products import packed, packed_of, stacked
from engine.devices.cuda.kernels import add_norm, gate, open_heads, rotate, token_vectors
from engine.devices.cuda.latents import attend_latents
from engine.devices.cuda.products import TiledLinear, tiled
from engine.devices.cuda.recurrent import mixers
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.torch.operations import (
    Operations,
    capped,
    scaled,
)
from engine.kv.attention import AttentionBackend, AttentionOptions
from engine.kv.state_slots import RecurrentLayer
from engine.lora.table import Adapters
from engine.model.program import (
    Activation,
    Attention,
    ExpertNorms,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    ModelProgram,
    Norm,
    Product,
    Recurrent,
    Rotation,
    TokenInput,
    TokenVectors,
)
from engine.triton_support import ceil_div, power_of_two

_GATE_BLOCK = 1024
_NORM_WARPS = 8


class Made(NamedTuple):
    """The output of mixers, of an MLP or of experts: `rows`, or with `shares` [rows, n] the sum of every n of
    them, times their shares; and the rows `beside` it, times the sigmoid of `opening` [rows, 1].
    """

    rows: Tensor
    shares: Tensor | None = None
    beside: Tensor | None = None
    opening: Tensor | None = None
    norms: ExpertNorms | None = None
    """Norms of the sum and of `beside`, before these are added."""


class _Part(NamedTuple):
    """The mixers of a layer, or its MLP and experts, between the norms of their input and of their output."""

    norm: Norm | None
    compute: Callable[[Layer, Tensor, StepInputs], Made]
    norm_of_added: Norm | None
    apart: ExpertNorms | None = None
    """The norms of experts that read the residual."""


class Added(NamedTuple):
    """Rows to be added to the residual, once they are normed, and the factor of the sum."""

    made: Made
    norm: Norm | None
    multiplier: Tensor | None = None


class CudaDecoder(Operations[StepInputs]):
    """A decoder with ten kernels per layer of attention and gated MLP; nine if no sequence has several splits
    of keys; eight more if some row may have an adapter.
    """

    name = "CUDA decoder"
    no_hidden: Tensor | None = None
    hidden_of_all = False
    operators: TritonOperators | None

    def __init__(
        self,
        program: ModelProgram,
        backend: AttentionBackend,
        positions: int,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
        operators: TritonOperators | None = None,
        recurrent: Sequence[RecurrentLayer] = (),
    ) -> None:
        """Take a program in which `unfit` finds no fault. Its linear layers become views of the weights that
        are joined here. `hidden_layers` are captured, numbered as in Transformers' `hidden_states`.
        """
        self.adapters, self.operators, self.recurrent = adapters, operators, recurrent
        backends, self._tables = by_table(backend)
        self._backends = capturable(backends)
        self._hidden_layers, self._program = hidden_layers, program
        self._rotations: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._products = {program.head: packed(program.head, None)}
        self._gated: dict[Product, TiledLinear] = {}
        """Products that activate their inputs."""
        self._low_rank: dict[Recurrent, Tensor | None] = {}
        """Weights [2, outputs, inputs] of mixers' low-rank products, if one kernel can multiply by both."""
        if program.token_vectors is not None:
            self._products[program.token_vectors.product] = packed(program.token_vectors.product, adapters)
        self._routers: dict[Experts, Router] = {}
        for layer in program.layers:
            if layer.experts is not None:
                is_shared = adapters is None and _share(layer.experts, layer.mlp)
                self._routers[layer.experts] = Router.of(layer.experts, shared=is_shared)
                if is_shared:
                    layer = replace(layer, mlp=None, experts=replace(layer.experts, shared_gate=None))
            self._products |= packed_of(layer, adapters)
            part = layer.token_input
            if part is not None and part.output.is_plain and adapters is None:
                output = part.output
                linear = tiled(output.linears[0], program.embeddings.dtype, plain=True)
                if isinstance(linear, TiledLinear):
                    self._gated[output] = linear
            for mixer in layer.mixers:
                if isinstance(mixer, Recurrent) and mixer.decays is not None:
                    self._low_rank[mixer] = stacked((mixer.decays, mixer.opening))
                rotation = None if isinstance(mixer, Recurrent) else mixer.rotation
                if rotation is not None and rotation not in self._rotations:
                    self._rotations[rotation] = rotation.tables(positions, program.embeddings)
        factor = program.residual_multiplier
        self._residual_multiplier = None if factor == 1 else factor

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Return logits of the requested rows, and all rows' hidden states. The backend's step has begun."""
        program, added, vectors = self._program, None, None
        residual = embedding(inputs.token_ids, program.embeddings)
        residual = scaled(residual, program.embedding_multiplier)
        if program.token_vectors is not None:
            vectors = self.vectors_of(program.token_vectors, inputs.token_ids, residual, inputs)
        captured: dict[int, Tensor] = {}
        for number, layer in enumerate(program.layers):
            parts = [_Part(layer.input_norm, self._mixed, layer.mixed_norm)] if layer.mixers else []
            if layer.mlp_norm is not None:
                apart = None if layer.experts is None else layer.experts.norms
                parts.append(_Part(layer.mlp_norm, self._fed, layer.made_norm, apart))
            for norm, compute, norm_of_added, apart in parts:
                normed = self._add_norm(added, residual, norm, apart)
                if number in self._hidden_layers and number not in captured:
                    captured[number] = residual.clone()
                added = Added(compute(layer, normed, inputs), norm_of_added)
            if layer.token_input is not None:
                assert vectors is not None
                part = layer.token_input
                self._add_norm(added, residual, None)
                made = self.add_token(part, residual, vectors[:, part.number], inputs)
                added = Added(Made(made), part.norm)
            if layer.multiplier is not None:
                assert added is not None
                added = added._replace(multiplier=layer.multiplier)
        captured[len(program.layers)] = last = self._add_norm(added, residual, program.final_norm)
        logits = self.multiply(program.head, last[inputs.logit_rows], inputs)
        if program.logits_divisor != 1:
            logits = logits / program.logits_divisor
        logits = capped(logits, program.logits_cap)
        if not self._hidden_layers:
            return logits, None
        return logits, torch.cat([captured[number] for number in self._hidden_layers], dim=-1)

    def _mixed(self, layer: Layer, normed: Tensor, rows: StepInputs) -> Made:
        outputs = [self.multiply(mixer.output, self.mix(mixer, normed, rows), rows) for mixer in layer.mixers]
        return Made(sum(outputs[1:], outputs[0]))

    def _fed(self, layer: Layer, normed: Tensor, rows: StepInputs) -> Made:
        """Run the MLP and the experts. Their outputs are added up by the next norm."""
        if layer.experts is None:
            assert layer.mlp is not None
            return Made(self._mlp(layer.mlp, normed, rows))
        router, experts = self._routers[layer.experts], layer.experts.holder.experts
        beside, opening, gate, norms = None, None, layer.experts.shared_gate, layer.experts.norms
        normed, scored, read = (normed,) * 3 if norms is None else normed.unbind()
        if layer.mlp is not None and not router.shared:
            beside = self._mlp(layer.mlp, normed, rows)
            opening = None if gate is None else self.multiply(gate, normed, rows)
        if not isinstance(experts, TiledExperts):  # those of several ranks
            return Made(experts(read, *router.choose(scored)), None, beside, opening, norms)
        routes, shares = router.routes(scored)
        return Made(experts.results(read, routes), shares, beside, opening, norms)

    def multiply(self, product: Product, x: Tensor, rows: StepInputs) -> Tensor:
        return self._products[product](x, rows.adapters)

    def activate(self, made: Tensor, activation: Activation, is_gated: bool) -> Tensor:
        if not is_gated or activation is Activation.RELU2:
            return super().activate(made, activation, is_gated)
        rows, size = len(made), made.shape[1] // 2
        out = made.new_empty((rows, size))
        grid = rows, ceil_div(size, _GATE_BLOCK)
        gate[grid](made, out, ACTIVATION=activation.value, SIZE=size, BLOCK=_GATE_BLOCK, num_warps=4)
        return out

    def vectors_of(self, vectors: TokenVectors, token_ids: Tensor, x: Tensor, rows: StepInputs) -> Tensor:
        made, norm = self.multiply(vectors.product, x, rows).unflatten(-1, (-1, vectors.size)), vectors.norm
        token_vectors[made.shape[:2]](
            made,
            token_ids,
            vectors.embeddings,
            norm.weight,
            norm.epsilon,
            vectors.factor,
            vectors.multiplier,
            vectors.sum_factor,
            KIND=norm.kind.value,
            LAYERS=made.shape[1],
            SIZE=vectors.size,
            PADDED=power_of_two(vectors.size),
            num_warps=1,
        )
        return made

    def add_token(self, part: TokenInput, x: Tensor, vectors: Tensor, rows: StepInputs) -> Tensor:
        if part.output not in self._gated:
            return super().add_token(part, x, vectors, rows)
        gates = self.multiply(part.gate, x, rows)
        return self._gated[part.output].of_gated(gates, vectors, part.activation)

    def apply_delta_rule(self, mixer: Recurrent, made: Tensor, normed: Tensor, step: StepInputs) -> Tensor:
        assert self.operators is not None and mixer.gates is not None
        if mixer.gates in self._products:
            gates = self.multiply(mixer.gates, normed, step)
        else:
            made, gates = made.split([mixer.inputs.outputs, mixer.gates.outputs], dim=-1)
        return mixers.apply_delta_rule(self.operators, mixer, made, gates, self._low_rank.get(mixer))

    def scan_states(self, mixer: Recurrent, made: Tensor) -> Tensor:
        assert self.operators is not None
        return mixers.scan_states(self.operators, mixer, made)

    def attend(self, mixer: Attention, made: Tensor, rows: StepInputs) -> Tensor:
        query = self._rotate(mixer, made, rows)
        backend = self._backends[self._table(mixer)]
        options = AttentionOptions(mixer.scale, mixer.window, sinks=mixer.sinks)
        return backend.attend(mixer.layer, query, options)

    def open_heads(self, mixer: Attention, attended: Tensor, made: Tensor) -> Tensor:
        open_heads[(len(made) * mixer.heads,)](
            attended,
            made,
            made.stride(0),
            HEADS=mixer.heads,
            SIZE=mixer.head_dim,
            PADDED=power_of_two(mixer.head_dim),
            num_warps=1,
        )
        return attended

    def attend_latents(self, mixer: LatentAttention, made: Tensor, rows: StepInputs) -> Tensor:
        turns = (None, None) if mixer.rotation is None else self._rotations[mixer.rotation]
        table = self._table(mixer)
        return attend_latents(mixer, made, rows, self._backends[table], self._slots(rows, table), turns)

    def _add_norm(
        self, added: Added | None, residual: Tensor, norm: Norm | None, apart: ExpertNorms | None = None
    ) -> Tensor:
        """Add `added` to `residual` in place; return the norm of the sum, or without a `norm` the sum. With
        `apart` return the norms for the MLP, the router and the experts [3, rows, size].
        """
        out, (rows, size) = residual if norm is None else torch.empty_like(residual), residual.shape
        if apart is not None:
            out = residual.new_empty((3, rows, size))
        how = norm or self._program.final_norm
        assert how is not None
        *made, norms = (None,) * 5 if added is None else added.made
        add_norm[(rows,)](
            *made,
            None if norms is None else norms.made.weight,
            None if norms is None else norms.beside.weight,
            None if added is None or added.norm is None else added.norm.weight,
            residual,
            None if added is None else added.multiplier,
            None if norm is None else norm.weight,
            None if apart is None else apart.router.weight,
            None if apart is None else apart.read.weight,
            out,
            how.epsilon,
            self._residual_multiplier,
            KIND=how.kind.value,
            CHOSEN=0 if added is None else len(added.made.rows) // rows,
            SIZE=size,
            PADDED=power_of_two(size),
            num_warps=_NORM_WARPS,
        )
        return out

    def _table(self, attention: Attention | LatentAttention) -> int:
        return 0 if self._tables is None else self._tables[attention.layer]

    @staticmethod
    def _slots(inputs: StepInputs, table: int) -> Tensor:
        slots = inputs.attention.slot_mapping
        return slots if slots.dim() == 1 else slots[table]

    def _rotate(self, attention: Attention, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """Write keys and values to the pool; return the queries."""
        table = self._table(attention)
        stored, slots = self._backends[table].layers[attention.layer], self._slots(inputs, table)
        heads, dim, kv_heads = attention.heads, attention.head_dim, attention.kv_heads
        cosines, sines = None, None
        if attention.rotation is not None:
            cosines, sines = self._rotations[attention.rotation]
        norms = attention.query_norm, attention.key_norm, attention.value_norm
        norm = norms[0] or self._program.final_norm
        assert norm is not None
        query = qkv.new_empty((len(qkv), heads, dim))
        rotate[(len(qkv), heads + 2 * kv_heads)](
            qkv,
            *(None if each is None else each.weight for each in norms),
            cosines,
            sines,
            query,
            *stored.pool,
            inputs.positions,
            slots,
            *stored.strides,
            norm.epsilon,
            KIND=norm.kind.value,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            PADDED=power_of_two(dim),
            ROTATED=0 if cosines is None else cosines.shape[1],
            GATED=int(attention.is_gated),
            SIDES=attention.sides,
            PAGE=stored.block_size,
            FP8=stored.is_fp8,
            num_warps=1,
            enable_fp_fusion=False,  # as in the backend, which writes other models' keys and values
        )
        return query


def _share(experts: Experts, mlp: Mlp | None) -> bool:
    """Make the MLP next to a layer's experts one more of them. Return whether it is one. Its result is then
    added up with theirs before the sum is rounded, while Transformers rounds their sum first.
    """
    own, gate = experts.holder.experts, experts.shared_gate
    if mlp is None or experts.norms is not None or not isinstance(own, TiledExperts):
        return False
    if gate is not None and type(gate.linears[0]) not in (nn.Linear, TiledLinear):
        return False
    if own.num_experts == len(experts.router):  # else another decoder of these layers has joined them
        whole = own.and_shared(mlp)
        if whole is None:
            return False
        experts.holder.experts = whole
    return True


def unfit(program: ModelProgram, *, with_adapters: bool = False) -> str | None:
    """Return why the decoder can't run the program; None if it can."""
    if program.entry is not None or program.final_norm is None:
        return "it is a draft head"
    for layer in program.layers:
        if layer.mixers and layer.input_norm is None:
            return "a layer has no norm of its input"
        has_low_rank = any(isinstance(each, Recurrent) and each.decays is not None for each in layer.mixers)
        if with_adapters and has_low_rank:
            return "adapters add to products of low rank, which are no program's"
    return None
