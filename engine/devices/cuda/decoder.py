"""Runs a program on a CUDA device: cuBLAS or our kernel multiplies, Triton does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from engine.batch.operators import StepOperators
from engine.batch.step_inputs import StepInputs
from engine.devices.attention_tables import by_table
from engine.devices.cuda.adapters import AdaptedProduct
from engine.devices.cuda.kernels import add_norm, gate, rotate
from engine.devices.cuda.products import TiledLinear, TiledWeight, concatenated, join
from engine.kv.attention import AttentionBackend
from engine.lora.table import Adapters
from engine.model.program import Activation, Attention, Layer, ModelProgram, Norm, Product, Rotation
from engine.triton_support import ceil_div, power_of_two

_GATE_BLOCK = 1024
_NORM_WARPS = 8


class PlainWeight(NamedTuple):
    """A weight [outputs, inputs] and a bias [outputs]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


Weight = PlainWeight | TiledWeight


class AdaptableProduct(NamedTuple):
    """A weight, and the products of adapters that are added to its output."""

    weight: Weight
    adapted: AdaptedProduct | None

    def __call__(self, x: Tensor, adapters: Tensor | None) -> Tensor:
        """Multiply, with the rows' `adapters` if some row may have one."""
        out = self.weight(x)
        if self.adapted is not None and adapters is not None:
            self.adapted.add(out, x, adapters)
        return out


class DecoderLayer(NamedTuple):
    """A layer's operations, packed."""

    attention: Attention
    cosines: Tensor
    sines: Tensor
    input_norm: Tensor
    qkv: AdaptableProduct
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: AdaptableProduct
    mixed_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: AdaptableProduct
    activation: Activation
    down: AdaptableProduct
    made_norm: Tensor | None


class CudaDecoder:
    """Ten kernels a layer, or nine where no sequence has several splits of keys, and eight more where some
    row may have an adapter.
    """

    name = "CUDA decoder"
    operators: StepOperators | None = None
    no_hidden: Tensor | None = None

    def __init__(
        self,
        program: ModelProgram,
        backend: AttentionBackend,
        positions: int,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        """For a program for which `unfit` finds nothing. Its linear layers keep views of the weights that are
        joined here. `hidden_layers` are captured, numbered as in Transformers' `hidden_states`.
        """
        backends, tables = by_table(backend)
        self._tables = tables
        self._backends: Sequence[Any] = backends  # that can be captured
        self._hidden_layers, self.adapters = hidden_layers, adapters
        self._program = program
        rotations: dict[Rotation, tuple[Tensor, Tensor]] = {}
        for (attention,) in (layer.mixers for layer in program.layers):
            assert isinstance(attention, Attention) and attention.rotation is not None
            if attention.rotation not in rotations:
                rotations[attention.rotation] = attention.rotation.tables(positions, program.embeddings)
        self._layers = [_layer(layer, rotations, adapters) for layer in program.layers]
        attention = self._layers[0].attention
        self._heads, self._dim, self._scale = attention.heads, attention.head_dim, attention.scale
        self._kv_heads = (attention.inputs.outputs // self._dim - self._heads) // 2
        assert program.final_norm is not None
        self._norm, self._head = program.final_norm, _joined(program.head.linears)
        factor = program.residual_multiplier
        self._residual_multiplier = None if factor == 1 else factor

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Return logits of the rows asked for, and hidden states of all rows. The backend has begun."""
        program, (added, added_norm) = self._program, (None, None)
        residual = embedding(inputs.token_ids, program.embeddings)
        if program.embedding_multiplier != 1:
            residual = residual * program.embedding_multiplier
        captured: dict[int, Tensor] = {}
        adapters = inputs.adapters
        for number, layer in enumerate(self._layers):
            normed = self._add_norm(added, added_norm, residual, layer.input_norm)
            if number in self._hidden_layers:
                captured[number] = residual.clone()
            query = self._rotate(layer, layer.qkv(normed, adapters), inputs)
            attended = self._backends[self._table(layer)].attend(
                layer.attention.layer,
                query,
                scale=self._scale,
                sliding_window=layer.attention.window or None,
            )
            added = layer.output(attended.flatten(1), adapters)
            normed = self._add_norm(added, layer.mixed_norm, residual, layer.mlp_norm)
            added = layer.down(_gate(layer.gate_up(normed, adapters), layer.activation), adapters)
            added_norm = layer.made_norm
        captured[len(self._layers)] = last = self._add_norm(added, added_norm, residual, self._norm.weight)
        logits = self._head(last[inputs.logit_rows])
        if program.logits_divisor != 1:
            logits = logits / program.logits_divisor
        if not self._hidden_layers:
            return logits, None
        return logits, torch.cat([captured[number] for number in self._hidden_layers], dim=-1)

    def _add_norm(
        self, added: Tensor | None, added_norm: Tensor | None, residual: Tensor, weight: Tensor
    ) -> Tensor:
        """Add to `residual`, in place, and return its norm."""
        out, (rows, size) = torch.empty_like(residual), residual.shape
        add_norm[(rows,)](
            added,
            added_norm,
            residual,
            weight,
            out,
            self._norm.epsilon,
            self._residual_multiplier,
            KIND=self._norm.kind.value,
            SIZE=size,
            PADDED=power_of_two(size),
            num_warps=_NORM_WARPS,
        )
        return out

    def _table(self, layer: DecoderLayer) -> int:
        return 0 if self._tables is None else self._tables[layer.attention.layer]

    def _rotate(self, layer: DecoderLayer, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """Write keys and values to the pool; return the queries."""
        table = self._table(layer)
        stored, slots = self._backends[table].layers[layer.attention.layer], inputs.attention.slot_mapping
        query = qkv.new_empty((len(qkv), self._heads, self._dim))
        rotate[(len(qkv), self._heads + 2 * self._kv_heads)](
            qkv,
            layer.query_norm,
            layer.key_norm,
            layer.cosines,
            layer.sines,
            query,
            *stored.pool,
            inputs.positions,
            slots if slots.dim() == 1 else slots[table],
            *stored.strides,
            self._norm.epsilon,
            KIND=self._norm.kind.value,
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            DIM=self._dim,
            PADDED=power_of_two(self._dim),
            PAGE=stored.block_size,
            FP8=stored.is_fp8,
            num_warps=1,
            enable_fp_fusion=False,  # as in the backend, which writes other models' keys and values
        )
        return query


def _gate(gate_up: Tensor, activation: Activation) -> Tensor:
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    grid = rows, ceil_div(size, _GATE_BLOCK)
    gate[grid](gate_up, out, ACTIVATION=activation.value, SIZE=size, BLOCK=_GATE_BLOCK, num_warps=4)
    return out


def _layer(
    layer: Layer, rotations: Mapping[Rotation, tuple[Tensor, Tensor]], adapters: Adapters | None
) -> DecoderLayer:
    (attention,), mlp = layer.mixers, layer.mlp
    assert isinstance(attention, Attention) and attention.rotation is not None
    assert mlp is not None and layer.input_norm and layer.mlp_norm

    def adaptable(product: Product) -> AdaptableProduct:
        adapted = None if adapters is None else AdaptedProduct.of(list(product.paths), adapters)
        return AdaptableProduct(_joined(product.linears), adapted)

    def weight(norm: Norm | None) -> Tensor | None:
        return None if norm is None else norm.weight

    return DecoderLayer(
        attention,
        *rotations[attention.rotation],
        layer.input_norm.weight,
        adaptable(attention.inputs),
        weight(attention.query_norm),
        weight(attention.key_norm),
        adaptable(attention.output),
        weight(layer.mixed_norm),
        layer.mlp_norm.weight,
        adaptable(mlp.gate_up),
        mlp.activation,
        adaptable(mlp.down),
        weight(layer.made_norm),
    )


def unfit(program: ModelProgram) -> str | None:
    """Why the decoder can't run the program; None if it can."""
    if program.entry is not None or program.final_norm is None or program.head.multipliers is not None:
        return "it is no whole model without multipliers of logits"
    faults = (_unfit_layer(layer, program.embeddings) for layer in program.layers)
    return next(filter(None, faults), None)


def _unfit_layer(layer: Layer, like: Tensor) -> str | None:
    mixer, mlp = (layer.mixers or (None,))[0], layer.mlp
    if not isinstance(mixer, Attention) or len(layer.mixers) > 1 or mlp is None or layer.experts is not None:
        return "a layer is not attention and an MLP"
    if mixer.is_gated or mixer.input_multiplier != 1 or not mlp.is_gated:
        return "a layer has an output gate, a multiplier or an MLP without gates"
    if mixer.rotation is None or mixer.rotation.tables(1, like)[0].shape[1] != mixer.head_dim:
        return "a layer rotates a part of each head, or nothing"
    products = list(layer.products())
    if not all(_are_alike(product.linears) and product.multipliers is None for product in products):
        return "layers of one input are multiplied in several ways"
    return None


def _are_alike(linears: Sequence[nn.Module]) -> bool:
    tiled = [linear.tiled for linear in linears if isinstance(linear, TiledLinear)]
    if tiled:
        return len(tiled) == len(linears) and all(part.is_like(tiled[0]) for part in tiled)
    return all(isinstance(linear, nn.Linear) for linear in linears)


def _joined(linears: Sequence[nn.Module]) -> Weight:
    """Join layers of one input. Two decoders of the same layers share what is joined."""
    tiled = [each for each in linears if isinstance(each, TiledLinear)]
    if tiled:
        return join(tiled)
    plain = [each for each in linears if isinstance(each, nn.Linear)]
    weight = concatenated([each.weight.detach() for each in plain])
    bias = concatenated([None if each.bias is None else each.bias.detach() for each in plain])
    assert weight is not None
    for each, part in zip(plain, weight.split([each.out_features for each in plain]), strict=True):
        each.weight = nn.Parameter(part, requires_grad=False)
    return PlainWeight(weight, bias)
