"""A served model as operations with their weights. `engine.model.describe` makes it; each device runs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn


class NormKind(IntEnum):
    """How a norm multiplies by its weights; `row_math.h` has the same."""

    PLAIN = 0
    """Normalized values are rounded first."""
    CENTRED = 1
    """Weights are the factors less 1; only the product is rounded."""
    EXACT = 2
    """Only the product is rounded."""


class MixerKind(IntEnum):
    """An operation that mixes a layer's rows; `structs.h` has the same."""

    ATTENTION = 0
    DELTA = 1
    SHORT_CONV = 2
    STATE_SPACE = 3
    NOTHING = 4
    CHANNEL_DELTA = 5
    LATENT = 6


class Activation(IntEnum):
    """The activation of an MLP or an expert; `row_math.h` has the same."""

    SILU = 0
    RELU2 = 1
    GELU_TANH = 2


class Score(IntEnum):
    """How a router's logits become scores; `routing.h` has the same."""

    SOFTMAX = 0
    SIGMOID = 1


@dataclass(frozen=True, eq=False)
class Norm:
    """A root mean square norm."""

    weight: Tensor
    epsilon: float
    kind: NormKind = NormKind.PLAIN


@dataclass(frozen=True, eq=False)
class Product:
    """Linear layers of one input, whose outputs lie side by side."""

    linears: tuple[Any, ...]
    paths: tuple[str, ...] = ()
    """The layers' paths in the model, by which adapters name them; empty in a draft head."""
    multipliers: Tensor | None = None
    """Factors of the outputs, float32 [outputs]."""

    @property
    def outputs(self) -> int:
        return sum(linear.out_features for linear in self.linears)


@dataclass(frozen=True, eq=False)
class Rotation:
    """A Transformers rotary embedding whose angles depend on positions alone."""

    module: Any
    layer_type: str | None = None
    """The kind of layers whose angles the module is asked for, if it has several."""

    def tables(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, rotated dims], in the dtype and on the device of `like`."""
        places = torch.arange(positions, device=like.device).unsqueeze(0)
        kinds = () if self.layer_type is None else (self.layer_type,)
        with torch.no_grad():
            cosines, sines = self.module(like.reshape(-1)[:1], places, *kinds)
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
    """Attention over the KV of pool layer `layer`. Its inputs are queries, keys and values; with `is_gated`
    an output gate lies next to each head's query.
    """

    kind: MixerKind = MixerKind.ATTENTION
    layer: int
    heads: int
    head_dim: int
    scale: float
    rotation: Rotation | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    window: int = 0
    is_gated: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentAttention(Mixer):
    """Absorbed latent attention (`engine.devices.torch.latent_attention`) without rotation. Its inputs are
    the heads' queries, or with `queries` a short vector that these are made of past `query_norm`; then the
    latent, which `key_norm` norms, and the part of a key that all heads share.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Recurrent(Mixer):
    """A mixer with a state: a causal convolution, then for all kinds but SHORT_CONV linear attention."""

    number: int
    """The number among the model's recurrent layers."""
    taps: Tensor
    """The convolution's weights [channels, taps]."""
    bias: Tensor | None
    gates: Product | None = None
    decays: Any | None = None
    """The second layer of a low-rank product that makes CHANNEL_DELTA's decays."""
    opening: Any | None = None
    """The second layer of a low-rank product that makes CHANNEL_DELTA's output gates."""
    rates: Tensor | None = None
    """Negative decay rates [heads], float32."""
    shifts: Tensor | None = None
    skips: Tensor | None = None
    norm: Norm | None = None
    group: int = 0
    """Values that STATE_SPACE norms together."""
    norms_first: bool = False
    """Whether STATE_SPACE norms outputs before it gates them."""
    is_interleaved: bool = False
    """Whether DELTA's products have their outputs key head by key head."""
    shortest: float = 0.0
    """The lower limit of STATE_SPACE's times."""
    longest: float = float("inf")


@dataclass(frozen=True, eq=False)
class Mlp:
    """Products with an activation between them. With `is_gated` the first product makes gates, which are
    activated, and as many values.
    """

    gate_up: Product
    down: Product
    activation: Activation
    is_gated: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Experts:
    """A mixture of experts with its router."""

    holder: Any
    """The module whose `experts` are Transformers' fused ones or `engine.linear.experts.Experts`."""
    router: Tensor
    """[experts, inputs]"""
    chosen: int
    score: Score
    preferences: Tensor | None
    """Added to scores only to find the highest, [experts]."""
    groups: int
    open_groups: int
    """How many groups of experts, those with the highest scores, a row chooses from."""
    normalizes: bool
    """Whether the chosen scores are divided by their sum plus `least_sum`."""
    least_sum: float
    scaling: float
    is_exact: bool
    """Whether scores are computed in float32."""
    rounds: bool
    """Whether weights are rounded to the model's dtype."""
    opener: Product | None
    """Makes the gate of the MLP next to the experts."""
    activation: Activation
    is_gated: bool


@dataclass(frozen=True, eq=False)
class Layer:
    """Mixers that read the same rows and whose outputs are added; then an MLP, experts or both.

    `mixed_norm` and `made_norm` norm what mixers and MLP add to the residual.
    """

    mixers: tuple[Attention | LatentAttention | Recurrent, ...]
    input_norm: Norm | None
    mlp_norm: Norm | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    mixed_norm: Norm | None = None
    made_norm: Norm | None = None

    def products(self) -> Iterator[Product]:
        """Yield all products of linear layers but those of low rank and of latents."""
        for mixer in self.mixers:
            yield mixer.inputs
            yield mixer.output
            if isinstance(mixer, Recurrent) and mixer.gates is not None:
                yield mixer.gates
        if self.mlp is not None:
            yield self.mlp.gate_up
            yield self.mlp.down
        if self.experts is not None and self.experts.opener is not None:
            yield self.experts.opener


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """The input of a draft head: a token's embedding and the hidden state before it, in one position less.

    EAGLE-1 and 2 make one vector of both by `joint`, MTP heads of both normed. EAGLE-3 norms both and
    concatenates them for the layer's products; the hidden state is the residual.
    """

    token_norm: Norm | None = None
    hidden_norm: Norm | None = None
    joint: Any | None = None
    mixing: Any | None = None
    """Makes the head's hidden states from the target's; None if another module does, or they are equal."""
    normed_goes_on: bool = False
    """Whether the residual is the normed hidden state."""
    feeds_normed: bool = False
    """Whether the next row's hidden state is the normed output."""
    token_ids: Tensor | None = None
    """The target's ids of the head's tokens; None: the same."""


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
    entry: Entry | None = None

    @property
    def hidden_size(self) -> int:
        return self.embeddings.shape[1]

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)
