"""A served model as operations with their weights, made by `engine.model.describe` and run by each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn


class NormKind(IntEnum):
    """The rounding of a norm's product with its weights; `row_math.h` has the same values."""

    PLAIN = 0
    """The normalized values are rounded, then multiplied."""
    CENTRED = 1
    """Weights are stored minus 1; only the product is rounded."""
    EXACT = 2
    """The product is rounded, the normalized values are not."""


class MixerKind(IntEnum):
    """An operation that mixes a layer's rows; `structs.h` has the same values."""

    ATTENTION = 0
    DELTA = 1
    SHORT_CONV = 2
    STATE_SPACE = 3
    NOTHING = 4
    CHANNEL_DELTA = 5
    LATENT = 6


class Activation(IntEnum):
    """The activation of an MLP or an expert; `row_math.h` has the same values."""

    SILU = 0
    RELU2 = 1
    GELU_TANH = 2
    CLAMPED_SWIGLU = 3
    """gpt-oss's: gates and values alternate, both are limited to `SWIGLU_LIMIT`, a gate is multiplied by the
    sigmoid of `SWIGLU_SLOPE` times itself, and a value is increased by 1.
    """


SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0


class Score(IntEnum):
    """The function that turns a router's logits into scores; `routing.h` has the same values."""

    SOFTMAX = 0
    SIGMOID = 1
    CHOSEN_SOFTMAX = 2
    """The softmax of the chosen experts' logits alone."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A root mean square norm."""

    weight: Tensor
    epsilon: float
    kind: NormKind = NormKind.PLAIN


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class Product:
    """Linear layers that read one input; their outputs are concatenated. A tensor-parallel rank has some
    outputs of them: `enter` makes the whole input from the rank's part, `leave` whole outputs from its own.
    """

    linears: tuple[Any, ...]
    paths: tuple[str, ...] = ()
    """The layers' paths in the model, which adapters use as names; empty in a draft head."""
    multipliers: Tensor | None = None
    """Factors of the outputs, float32 [outputs]."""
    enter: Callable[[Tensor], Tensor] = _unchanged
    leave: Callable[[Tensor], Tensor] = _unchanged

    @property
    def is_plain(self) -> bool:
        """Whether it is no rank's, and its outputs have no multipliers."""
        return self.multipliers is None and self.enter is self.leave is _unchanged

    @property
    def outputs(self) -> int:
        return sum(linear.out_features for linear in self.linears)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A Transformers rotary embedding whose angles depend only on positions."""

    module: Any
    layer_type: str | None = None
    """The layer type to ask the module for, if it has several."""
    is_half: bool = False
    """Whether the module makes the angles of the rotated dims' first half, which are the second's too."""

    def tables(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, rotated dims], in the dtype and on the device of `like`."""
        places = torch.arange(positions, device=like.device).unsqueeze(0)
        if hasattr(self.module, "mrope_section"):  # Transformers 5.17 wants time, height and width
            places = places.expand(3, 1, -1)
        kinds = () if self.layer_type is None else (self.layer_type,)
        with torch.no_grad():
            cosines, sines = self.module(like.reshape(-1)[:1], places, *kinds)
        if self.is_half:
            return cosines[0].repeat(1, 2), sines[0].repeat(1, 2)
        return cosines[0].contiguous(), sines[0].contiguous()


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixer:
    """An operation that mixes rows, between two products."""

    kind: MixerKind
    inputs: Product
    output: Product
    input_multiplier: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(Mixer):
    """Attention over the KV of pool layer `layer`. Its inputs are queries, keys and values; with `is_gated`,
    each head's query is followed by an output gate. Values are made of the keys, before these are normed, if
    `sides` is 1. If it is 0 there are only queries, as layer `source` has written the keys and values.
    """

    kind: MixerKind = MixerKind.ATTENTION
    layer: int
    heads: int
    head_dim: int
    scale: float
    rotation: Rotation | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    sides: int = 2
    source: int | None = None
    window: int = 0
    is_gated: bool = False
    sinks: Tensor | None = None
    """One more score for each head, as in `engine.kv.attention.AttentionOptions`."""

    @property
    def query_size(self) -> int:
        """The width of a row's queries, with their gates."""
        return self.heads * self.head_dim * (2 if self.is_gated else 1)

    @property
    def kv_heads(self) -> int:
        """The number of KV heads that the inputs make."""
        made = self.inputs.outputs - self.query_size
        return made // self.head_dim // self.sides if self.sides else 0


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentAttention(Mixer):
    """Absorbed latent attention (`engine.devices.torch.latent_attention`). Its inputs are the heads' queries,
    or with `queries` a short vector, normed by `query_norm`, from which `queries` makes them; then the
    latent, normed by `key_norm`, and the part of the key that all heads share. That part is rotated, and the
    equal part of each query.
    """

    kind: MixerKind = MixerKind.LATENT
    layer: int
    heads: int
    head_dim: int
    scale: float
    queries: Any | None
    query_norm: Norm | None
    key_norm: Norm
    to_latent: nn.Module
    to_value: nn.Module
    rotation: Rotation | None = None
    in_pairs: bool = False
    """Whether values that turn together are neighbours. They are apart by half the part once rotated."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recurrent(Mixer):
    """A mixer with a state: a causal convolution, followed by linear attention except for SHORT_CONV."""

    number: int
    """Index among the model's recurrent layers."""
    taps: Tensor
    """The convolution's weights [channels, taps]."""
    bias: Tensor | None
    gates: Product | None = None
    decays: Any | None = None
    """The second layer of the low-rank product for CHANNEL_DELTA's decays."""
    opening: Any | None = None
    """The second layer of the low-rank product for CHANNEL_DELTA's output gates."""
    rates: Tensor | None = None
    """Negative decay rates [heads], float32."""
    shifts: Tensor | None = None
    skips: Tensor | None = None
    norm: Norm | None = None
    group: int = 0
    """Number of values that STATE_SPACE norms together."""
    norms_first: bool = False
    """Whether STATE_SPACE norms outputs before it gates them."""
    is_interleaved: bool = False
    """Whether the outputs of DELTA's products are ordered by key head."""
    shortest: float = 0.0
    """Lower limit of STATE_SPACE's time steps; `longest` is the upper one."""
    longest: float = float("inf")

    @property
    def inputs_and_gates(self) -> Product | None:
        """One product that makes the outputs of `inputs` and `gates`; None if there is none."""
        first, second = self.inputs, self.gates
        if second is None or not first.is_plain or not second.is_plain:
            return None
        return Product(first.linears + second.linears, first.paths + second.paths)


@dataclass(frozen=True, eq=False)
class Mlp:
    """Two products with an activation between them. With `is_gated`, the first product makes gates, which are
    activated, and equally many values.
    """

    gate_up: Product
    down: Product
    activation: Activation
    is_gated: bool


@dataclass(frozen=True, eq=False)
class ExpertNorms:
    """Norms of experts that read the residual, not the rows of the MLP beside them: of the `router`'s rows,
    of those that the experts `read`, and of what they have `made` and the MLP `beside` them, before these
    are added.
    """

    router: Norm
    read: Norm
    made: Norm
    beside: Norm


@dataclass(frozen=True, eq=False, kw_only=True)
class Experts:
    holder: Any
    """The module whose `experts` are Transformers' fused experts or `ExpertsModule`."""
    router: Tensor
    """The router's weight [experts, inputs]."""
    router_bias: Tensor | None
    chosen: int
    score: Score
    preferences: Tensor | None
    """Bias [experts] added to the scores only to select experts."""
    groups: int
    open_groups: int
    """Number of groups of experts, those with the highest scores, from which a row selects."""
    normalizes: bool
    """Whether the selected scores are divided by their sum plus `least_sum`."""
    least_sum: float
    scaling: float
    is_exact: bool
    """Whether scores are computed in float32."""
    rounds: bool
    """Whether weights are rounded to the model's dtype."""
    shared_gate: Product | None
    """The product that gates the MLP next to the experts."""
    activation: Activation
    is_gated: bool
    factors: Tensor | None = None
    """Factors [experts] of the weights."""
    norms: ExpertNorms | None = None


@dataclass(frozen=True, eq=False)
class TokenInput:
    """A residual made of the layer's output and a vector of the row's token (`TokenVectors`): `output` of the
    vector times the activated `gate`, normed. `number` is the vector's.
    """

    number: int
    gate: Product
    output: Product
    norm: Norm
    activation: Activation


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """The vectors of a token for each layer: the normed `product` of its embedding, times `factor`, plus its
    vectors in `embeddings` [vocabulary, layers * size], times `multiplier`; the sum times `sum_factor`.
    """

    embeddings: Tensor
    multiplier: float
    product: Product
    factor: float
    norm: Norm
    sum_factor: float = 2.0**-0.5

    @property
    def size(self) -> int:
        return len(self.norm.weight)


@dataclass(frozen=True, eq=False)
class Layer:
    """Mixers that read the same rows and whose outputs are added; then an MLP, experts or both.

    `mixed_norm` and `made_norm` norm the outputs of mixers and MLP before the residual addition.
    """

    mixers: tuple[Attention | LatentAttention | Recurrent, ...]
    input_norm: Norm | None
    mlp_norm: Norm | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    mixed_norm: Norm | None = None
    made_norm: Norm | None = None
    token_input: TokenInput | None = None
    multiplier: Tensor | None = None
    """A factor [1] of the layer's output."""

    def products(self) -> Iterator[Product]:
        """Yield all products of linear layers except low-rank products and products of latents."""
        for mixer in self.mixers:
            yield mixer.inputs
            yield mixer.output
            if isinstance(mixer, Recurrent) and mixer.gates is not None:
                yield mixer.gates
        if self.mlp is not None:
            yield self.mlp.gate_up
            yield self.mlp.down
        if self.experts is not None and self.experts.shared_gate is not None:
            yield self.experts.shared_gate
        if self.token_input is not None:
            yield self.token_input.gate
            yield self.token_input.output


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadInput:
    """The input of a draft head: a token's embedding and the previous position's hidden state.

    EAGLE-1 and 2 make one vector of both by `joint`, MTP heads after norming both. EAGLE-3 norms both and
    concatenates them for the layer's products; the hidden state is the residual.
    """

    token_norm: Norm | None = None
    hidden_norm: Norm | None = None
    joint: Any | None = None
    mixing: Any | None = None
    """The layer that makes the head's hidden states from the target's; None if nothing here changes them."""
    normed_goes_on: bool = False
    """Whether the residual is the normed hidden state."""
    feeds_normed: bool = False
    """Whether the next row's hidden state is the normed output."""
    token_ids: Tensor | None = None
    """The target's ids of the head's tokens; None if both vocabularies are equal."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelProgram:
    """A model from token ids to logits. Weights may be freed once an executor has packed them."""

    name: str
    embeddings: Tensor
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    head: Product
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float = 0.0
    """Soft cap: cap c turns a logit l into c * tanh(l / c); 0: no cap."""
    token_vectors: TokenVectors | None = None
    entry: HeadInput | None = None

    @property
    def hidden_size(self) -> int:
        return self.embeddings.shape[1]

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)
