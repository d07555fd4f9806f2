"""Llama, Mistral, Qwen2 and Qwen3 on a CUDA device: cuBLAS or our kernel multiplies, Triton does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from engine.batch.step_inputs import StepInputs
from engine.devices.cpu.decoder.description import attention_window
from engine.devices.cuda.adapters import AdaptedProduct
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.kernels import add_norm, gate, rotate
from engine.devices.cuda.products import TiledLinear, TiledWeight, concatenated, join
from engine.lora.table import Adapters
from engine.model.families import FAMILIES, LLAMA
from engine.triton_support import ceil_div, power_of_two

_GATE_BLOCK = 1024
_NORM_WARPS = 8


class PlainWeight(NamedTuple):
    """[outputs, inputs], and [outputs]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


Weight = PlainWeight | TiledWeight


class AdaptableProduct(NamedTuple):
    """A weight, and what adapters add beside it."""

    weight: Weight
    adapted: AdaptedProduct | None

    def __call__(self, x: Tensor, adapters: Tensor | None) -> Tensor:
        """With the rows' `adapters`, if some row may have one."""
        out = self.weight(x)
        if self.adapted is not None and adapters is not None:
            self.adapted.add(out, x, adapters)
        return out


class Layer(NamedTuple):
    place: int
    """In the pool: its number in the whole model, of which this one may be a part."""
    input_norm: Tensor
    qkv: AdaptableProduct
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: AdaptableProduct
    mlp_norm: Tensor
    gate_up: AdaptableProduct
    down: AdaptableProduct
    window: int | None


class CudaDecoder:
    """Ten kernels a layer, or nine where no sequence has several splits of keys, and eight more where some
    row may have an adapter.
    """

    name = "CUDA decoder"

    def __init__(
        self,
        model: PreTrainedModel,
        backend: TritonBackend,
        positions: int,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
    ) -> None:
        """For a model for which `unfit` finds nothing. Its linear layers keep views of what is joined here.
        `hidden_layers` are captured, numbered as in Transformers' `hidden_states`.
        """
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        self._backend = backend
        self._hidden_layers = hidden_layers
        self._heads, self._dim = config.num_attention_heads, attention.head_dim
        self._kv_heads, self._scale = config.num_key_value_heads, float(attention.scaling)
        self._epsilon = config.rms_norm_eps
        self._embeddings = model.get_input_embeddings().weight
        products = _Products(model, adapters)
        self._layers = [_layer(layer, products) for layer in decoder.layers]
        self._final_norm, self._head = decoder.norm.weight, _joined([model.lm_head])
        with torch.inference_mode():
            self._cosines, self._sines = _rotation(decoder.rotary_emb, positions, self._embeddings)

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows asked for, and hidden states of all rows. The backend has begun its step."""
        residual, added = embedding(inputs.token_ids, self._embeddings), None
        captured: dict[int, Tensor] = {}
        adapters = inputs.adapters
        for number, layer in enumerate(self._layers):
            normed = self._add_norm(added, residual, layer.input_norm)
            if number in self._hidden_layers:
                captured[number] = residual.clone()
            query = self._rotate(layer, layer.qkv(normed, adapters), inputs)
            attended = self._backend.attend(
                layer.place, query, scale=self._scale, sliding_window=layer.window
            )
            added = layer.output(attended.flatten(1), adapters)
            normed = self._add_norm(added, residual, layer.mlp_norm)
            added = layer.down(_gate(layer.gate_up(normed, adapters)), adapters)
        captured[len(self._layers)] = last = self._add_norm(added, residual, self._final_norm)
        logits = self._head(last[inputs.logit_rows])
        if not self._hidden_layers:
            return logits, None
        return logits, torch.cat([captured[number] for number in self._hidden_layers], dim=-1)

    def _add_norm(self, added: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        """The norm of the sum, which `residual` becomes."""
        out, (rows, size) = torch.empty_like(residual), residual.shape
        add_norm[(rows,)](
            added,
            residual,
            weight,
            out,
            self._epsilon,
            SIZE=size,
            PADDED=power_of_two(size),
            num_warps=_NORM_WARPS,
        )
        return out

    def _rotate(self, layer: Layer, qkv: Tensor, inputs: StepInputs) -> Tensor:
        """Writes keys and values to the pool; returns the queries."""
        stored = self._backend.layers[layer.place]
        query = qkv.new_empty((len(qkv), self._heads, self._dim))
        rotate[(len(qkv), self._heads + 2 * self._kv_heads)](
            qkv,
            layer.query_norm,
            layer.key_norm,
            self._cosines,
            self._sines,
            query,
            *stored.pool,
            inputs.positions,
            inputs.attention.slot_mapping,
            *stored.strides,
            self._epsilon,
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


def _gate(gate_up: Tensor) -> Tensor:
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    gate[(rows, ceil_div(size, _GATE_BLOCK))](gate_up, out, SIZE=size, BLOCK=_GATE_BLOCK, num_warps=4)
    return out


class _Products:
    """Makes those of a model."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._paths = {module: path for path, module in model.named_modules()}

    def of(self, linears: Sequence[nn.Module]) -> AdaptableProduct:
        """Of layers of one input."""
        adapted = None
        if self._adapters is not None:
            adapted = AdaptedProduct.of([self._paths[linear] for linear in linears], self._adapters)
        return AdaptableProduct(_joined(linears), adapted)


def _layer(layer: Any, products: _Products) -> Layer:
    attention = layer.self_attn
    qkv, _, output, gate_up, down, _ = LLAMA.products(layer)
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Layer(
        attention.layer_idx,
        layer.input_layernorm.weight,
        products.of(qkv),
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        products.of(output),
        layer.post_attention_layernorm.weight,
        products.of(gate_up),
        products.of(down),
        attention_window(attention) or None,
    )


def fits(model: PreTrainedModel) -> bool:
    """Whether a model for which `unfit` finds nothing is a Llama, and its layers of one input are multiplied
    alike.
    """
    if FAMILIES[type(model).__name__] is not LLAMA:
        return False
    products = (linears for layer in model.model.layers for linears in LLAMA.products(layer))
    return all(_are_alike(linears) for linears in products if len(linears) > 1)


def _are_alike(linears: Sequence[nn.Module]) -> bool:
    tiled = [linear.tiled for linear in linears if isinstance(linear, TiledLinear)]
    if tiled:
        return len(tiled) == len(linears) and all(part.is_like(tiled[0]) for part in tiled)
    return all(isinstance(linear, nn.Linear) for linear in linears)


def _joined(linears: Sequence[nn.Module]) -> Weight:
    """Of layers of one input. What two decoders of the same layers join is there once."""
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


def _rotation(rotary: Any, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] of a Transformers rotary embedding, as its models use them."""
    places = torch.arange(positions, device=like.device).unsqueeze(0)
    cosines, sines = rotary(like[:1], places)
    return cosines[0].contiguous(), sines[0].contiguous()
