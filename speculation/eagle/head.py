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
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from engine.model import program
from engine.model.describe import activation_of, embedding_scale
from engine.model.program import Attention, Entry, Layer, ModelProgram, Norm, Product, Rotation


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
    head_norms: bool = False
    """Whether queries and keys are normed (Qwen3's layers)."""
    biases: frozenset[str] = field(default=frozenset())


class Head(nn.Module):
    """The weights of a head but for its embedding and LM head, which may be the target's. `head_program`
    describes how they are run.
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

    @property
    def mixing(self) -> nn.Linear | None:
        """The layer that `combine` applies, if that is all it does."""
        plain = self.shape.is_eagle3 and self.input_norm is None and self.fc_norm is None
        return self.fc if plain else None


def head_program(
    head: Head, embedding: nn.Module, lm_head: nn.Module, draft_ids: Tensor | None = None
) -> ModelProgram:
    """Describe a head. `draft_ids` are the target's ids of its tokens; None: the same."""
    shape, layer = head.shape, head.midlayer
    attention, mlp, scale = layer.self_attn, layer.mlp, shape.logit_scale

    def norm(module: Any) -> Norm:
        return Norm(module.weight, shape.rms_norm_eps)

    if shape.is_eagle3:
        entry = Entry(
            token_norm=norm(layer.input_layernorm),
            hidden_norm=norm(layer.hidden_norm),
            mixing=head.mixing,
            normed_goes_on=shape.norm_before_residual,
            feeds_normed=shape.norm_output,
            token_ids=draft_ids,
        )
    else:
        entry = Entry(joint=head.fc, token_ids=draft_ids)
    mixer = Attention(
        inputs=Product((attention.q_proj, attention.k_proj, attention.v_proj)),
        output=Product((attention.o_proj,)),
        layer=0,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        rotation=Rotation(head.rotary),
        query_norm=norm(attention.q_norm) if shape.head_norms else None,
        key_norm=norm(attention.k_norm) if shape.head_norms else None,
        window=shape.sliding_window or 0,
    )
    made = program.Mlp(
        Product((mlp.gate_proj, mlp.up_proj)),
        Product((mlp.down_proj,)),
        activation_of(shape.hidden_act),
        is_gated=True,
    )
    num_logits = lm_head.out_features
    multipliers = None if scale == 1 else torch.full((num_logits,), scale)  # type: ignore[arg-type]
    return ModelProgram(
        name="draft head",
        embeddings=embedding.weight,  # type: ignore[arg-type]
        layers=(Layer((mixer,), None, norm(layer.post_attention_layernorm), made),),
        final_norm=norm(head.norm) if shape.is_eagle3 else None,
        head=Product((lm_head,), multipliers=multipliers),
        embedding_multiplier=embedding_scale(embedding),
        entry=entry,
    )


class MidLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        joined, inner = size, shape.intermediate_size
        if shape.is_eagle3:
            joined = 2 * size
            self.hidden_norm = LlamaRMSNorm(size, eps)
            self.input_layernorm = LlamaRMSNorm(size, eps)
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        widths = {
            "self_attn.q_proj": (joined, queries),
            "self_attn.k_proj": (joined, keys),
            "self_attn.v_proj": (joined, keys),
            "self_attn.o_proj": (queries, size),
            "mlp.gate_proj": (size, inner),
            "mlp.up_proj": (size, inner),
            "mlp.down_proj": (inner, size),
        }
        self.self_attn: Any = nn.Module()
        if shape.head_norms:
            self.self_attn.q_norm = LlamaRMSNorm(shape.head_dim, eps)
            self.self_attn.k_norm = LlamaRMSNorm(shape.head_dim, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp: Any = nn.Module()
        for name, width in widths.items():
            self.set_submodule(name, _linear(shape, f"midlayer.{name}", *width))


def _linear(shape: HeadShape, name: str, in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=name in shape.biases)
