"""The head: one decoder layer over pairs of a token and the target's hidden state before it.

EAGLE-1 and 2 (Li et al. 2024) feed `fc([embedding; feature])` to a layer without input norm, and take the
layer's output for the next feature. EAGLE-3 (Li et al. 2025) mixes the hidden states of several layers into
the feature, attends over `[norm(embedding); norm(feature)]`, and has a norm and an LM head of its own.
Parameters have the names of the published EAGLE-3 files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass(frozen=True)
class HeadShape:
    """`captured` are the target's hidden states that make the feature, numbered as in Transformers'
    `hidden_states`; all of them together are `feature_size` wide.

    `rope` are Transformers' `rope_parameters`. `biases` names the linear layers that have one. A
    `draft_vocab_size` of None stands for the target's vocabulary.
    """

    is_eagle3: bool
    captured: tuple[int, ...]
    feature_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: dict[str, Any]
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    draft_vocab_size: int | None = None
    mixes: bool = True
    """Whether `fc` makes the feature as wide as the layer (EAGLE-3 without: the feature is that already)."""
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    sliding_window: int | None = None
    biases: frozenset[str] = field(default=frozenset())


class Head(nn.Module):
    """All but the embedding and the LM head, which may be the target's.

    A row goes `combine` (features of the target alone), `enter`, `project`, attention, `leave`; then `normed`
    gives what the LM head takes and what the next row takes for its feature.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc: nn.Linear | None = None
        if shape.is_eagle3:
            per_layer = shape.feature_size // len(shape.captured)
            self.input_norm = LlamaRMSNorm(shape.feature_size, eps) if shape.norm_before_fc else None
            self.fc_norm = (
                nn.ModuleList(LlamaRMSNorm(per_layer, eps) for _ in shape.captured) if shape.fc_norm else None
            )
            if shape.mixes:
                self.fc = _linear(shape, "fc", shape.feature_size, size)
            self.norm = LlamaRMSNorm(size, eps)
        else:
            self.fc = _linear(shape, "fc", size + shape.feature_size, size)
        self.midlayer = MidLayer(shape)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=shape.num_heads * shape.head_dim,
                num_attention_heads=shape.num_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_positions,
                rope_parameters=dict(shape.rope),
            )
        )

    def combine(self, features: Tensor) -> Tensor:
        """From the target's hidden states [..., feature_size] to what a row takes [..., hidden_size]."""
        if not self.shape.is_eagle3 or self.fc is None:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention takes, and the residual stream [..., hidden_size]."""
        if not self.shape.is_eagle3:
            assert self.fc is not None
            joined = self.fc(torch.cat([embeddings, hidden], dim=-1))
            return joined, joined
        normed = self.midlayer.hidden_norm(hidden)
        joined = torch.cat([self.midlayer.input_layernorm(embeddings), normed], dim=-1)
        return joined, normed if self.shape.norm_before_residual else hidden

    def project(self, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [..., num_heads, head_dim], key and value with num_kv_heads; the first two are rotated to
        `positions` [...].
        """
        shape = self.shape
        attention = self.midlayer.self_attn
        query, key, value = (
            projection(joined).unflatten(-1, (-1, shape.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        # Transformers 5.17 takes positions [batch, places] alone.
        rotation = self.rotary(query, positions.reshape(1, -1))
        cos, sin = (each.view(*positions.shape, shape.head_dim) for each in rotation)
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=-2)
        return query, key, value

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [..., hidden_size], from `attended` [..., num_heads, head_dim]."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended.flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def normed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head takes, and the next row's feature."""
        if not self.shape.is_eagle3:
            return hidden, hidden
        normed = self.norm(hidden)
        return normed, normed if self.shape.norm_output else hidden


class MidLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        if shape.is_eagle3:
            self.hidden_norm = LlamaRMSNorm(size, eps)
            self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = Projections(shape)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = Mlp(shape)


class Projections(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        joined = 2 * shape.hidden_size if shape.is_eagle3 else shape.hidden_size
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = _linear(shape, "midlayer.self_attn.q_proj", joined, queries)
        self.k_proj = _linear(shape, "midlayer.self_attn.k_proj", joined, keys)
        self.v_proj = _linear(shape, "midlayer.self_attn.v_proj", joined, keys)
        self.o_proj = _linear(shape, "midlayer.self_attn.o_proj", queries, shape.hidden_size)


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        outer, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = _linear(shape, "midlayer.mlp.gate_proj", outer, inner)
        self.up_proj = _linear(shape, "midlayer.mlp.up_proj", outer, inner)
        self.down_proj = _linear(shape, "midlayer.mlp.down_proj", inner, outer)
        self.act = ACT2FN[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def _linear(shape: HeadShape, name: str, in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=name in shape.biases)
