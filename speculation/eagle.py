"""EAGLE heads: their shape and layers, how they run, and the published files that they are read from.

EAGLE-1 and 2 (Li et al. 2024) feed `fc([embedding; feature])` to a layer without input norm, and use the
layer's output as the next feature. EAGLE-3 (Li et al. 2025) mixes the hidden states of several layers into
the feature, attends over `[norm(embedding); norm(feature)]`, and has a norm and an LM head of its own.
Parameters have the names of the published EAGLE-3 files. SpecForge and `speculators` have their own
config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend, LayerKv
from engine.kv.layout import DRAFT, Group, Segment
from engine.load.select import runner_of_head
from engine.model import program
from engine.model.describe import activation_of, embedding_scale
from engine.model.program import Attention, HeadInput, Layer, ModelProgram, Norm, Product, Rotation
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.speculation import Quantization, SpeculativeConfig
from speculation.checkpoint import (
    EMBEDDING,
    TABLES,
    Checkpoint,
    activation,
    draft_ids_of,
    lm_head_of,
    number,
    own_table,
    read_tensors,
    rope,
    round_draft,
)
from speculation.head_drafter import DraftHead, HeadDrafter


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head. `captured` are the target's hidden states that make the feature, numbered as in
    Transformers' `hidden_states`, together `feature_size` wide.

    `rope` are Transformers' `rope_parameters`. `biases` names the linear layers with a bias. A
    `draft_vocab_size` of None means the target's vocabulary.
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
    """Whether `fc` makes the feature as wide as the layer. EAGLE-3 without `fc`: the feature already is."""
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
    """The weights of a head except for its tables. `head_program` describes how they run."""

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
        """Map the target's hidden states [..., feature_size] to the input of rows [..., hidden_size]."""
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
        """The layer that `combine` applies, if it does nothing else."""
        plain = self.shape.is_eagle3 and self.input_norm is None and self.fc_norm is None
        return self.fc if plain else None


def head_program(
    head: Head, embedding: nn.Module, lm_head: nn.Module, draft_ids: Tensor | None = None
) -> ModelProgram:
    """Describe a head. `draft_ids` are the target's ids of the draft's tokens; None if they are the same."""
    shape, layer = head.shape, head.midlayer
    attention, mlp, scale = layer.self_attn, layer.mlp, shape.logit_scale

    def norm(module: Any) -> Norm:
        return Norm(module.weight, shape.rms_norm_eps)

    if shape.is_eagle3:
        entry = HeadInput(
            token_norm=norm(layer.input_layernorm),
            hidden_norm=norm(layer.hidden_norm),
            mixing=head.mixing,
            normed_goes_on=shape.norm_before_residual,
            feeds_normed=shape.norm_output,
            token_ids=draft_ids,
        )
    else:
        entry = HeadInput(joint=head.fc, token_ids=draft_ids)
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
    multipliers = None if scale == 1 else torch.full((num_logits,), scale)
    return ModelProgram(
        name="draft head",
        embeddings=embedding.weight,
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


class EagleHead(DraftHead):
    """An EAGLE head. `embedding` and `lm_head` are None if the target's serve."""

    def __init__(
        self,
        head: Head,
        embedding: Tensor | None,
        lm_head: nn.Module | None,
        draft_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.head, self.embedding, self.lm_head, self.draft_ids = head, embedding, lm_head, draft_ids
        shape = head.shape
        self.hidden_layers, self.feature_size = shape.captured, shape.feature_size
        self.kv_group = Group.uniform(DRAFT, Segment(1, shape.num_kv_heads, shape.head_dim, dtype))
        self.mixes_in_program = head.mixing is not None
        self.combine = head.combine  # type: ignore[method-assign]

    def tables(self, target: LoadedModel) -> tuple[nn.Module, nn.Module]:
        """Return the embedding and the LM head: the target's where the file has none."""
        embedding, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        if self.embedding is not None:
            embedding = nn.Embedding.from_pretrained(self.embedding)
        return embedding, lm_head if self.lm_head is None else self.lm_head

    def runner(
        self,
        config: ServeConfig,
        target: LoadedModel,
        kv: Sequence[LayerKv],
        backend: type[AttentionBackend],
    ) -> Runner:
        embedding, lm_head = self.tables(target)
        parts = nn.ModuleList([self.head, lm_head])
        return runner_of_head(
            config,
            lambda: head_program(self.head, embedding, parts[1], self.draft_ids),
            parts,
            self.head.shape.max_positions,
            target,
            backend(kv),
        )

    def round(self, format: CodeFormat, target: LoadedModel) -> None:
        """Round the layers that are not the target's own. Raise ConfigError if the format fits none."""
        own = nn.ModuleList([self.head] if self.lm_head is None else [self.head, self.lm_head])
        round_draft(own, format, target)
        self.lm_head = own[1] if len(own) > 1 else None


def eagle_drafter(options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> HeadDrafter:
    assert options.model is not None
    return HeadDrafter(load_eagle(options.model, target, options.quantization), options, config)


def load_eagle(model: str, target: LoadedModel, quantization: Quantization | None = None) -> EagleHead:
    """Load a head. Raise `ConfigError` that names the file and what does not fit."""
    checkpoint = Checkpoint(model)
    shape = read_shape(checkpoint, target)
    head = Head(shape)
    names = {_our_name(name): name for name in checkpoint.names if name not in TABLES}
    head.load_state_dict(read_tensors(checkpoint, head.state_dict(), names))
    draft_ids = draft_ids_of(checkpoint, shape.draft_vocab_size, target)
    for parameter in head.parameters():  # like Transformers, keep the rotation's frequencies in float32
        parameter.data = parameter.data.to(target.dtype)
    loaded = EagleHead(
        head=head.to(target.device).eval().requires_grad_(False),
        embedding=own_table(checkpoint, EMBEDDING, target.vocab_size, shape.hidden_size, target),
        lm_head=lm_head_of(checkpoint, shape.hidden_size, draft_ids, target) if shape.is_eagle3 else None,
        draft_ids=draft_ids,
        dtype=target.dtype,
    )
    if quantization is not None:
        loaded.round(CodeFormat(quantization), target)
    return loaded


def _our_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def read_shape(checkpoint: Checkpoint, target: LoadedModel) -> HeadShape:
    """Read the shape from config.json and the tensors' names and shapes."""
    config = checkpoint.config
    layer = config.get("transformer_layer_config", config)
    if layer.get("num_hidden_layers", 1) != 1:
        raise checkpoint.error("num_hidden_layers", f"must be 1, got {layer['num_hidden_layers']}")
    theirs = target.model.config.get_text_config(decoder=True)
    hidden_size = number(checkpoint, layer, "hidden_size")
    num_heads = number(checkpoint, layer, "num_attention_heads")
    is_eagle3 = _is_eagle3(checkpoint)
    captured, mixes = _captured(checkpoint, theirs) if is_eagle3 else ((theirs.num_hidden_layers,), True)
    options = {**(config.get("eagle_config") or {}), **config}
    return HeadShape(
        is_eagle3=is_eagle3,
        captured=captured,
        feature_size=len(captured) * theirs.hidden_size,
        hidden_size=hidden_size,
        intermediate_size=number(checkpoint, layer, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        max_positions=max(layer.get("max_position_embeddings") or 0, target.max_model_len),
        rope=rope(checkpoint, layer, theirs),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        hidden_act=activation(checkpoint, layer),
        draft_vocab_size=config.get("draft_vocab_size") if is_eagle3 else None,
        mixes=mixes,
        fc_norm=bool(options.get("fc_norm")),
        norm_before_fc=bool(options.get("norm_before_fc")),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_output=bool(options.get("norm_output")),
        logit_scale=float(config.get("logit_scale") or 1.0),
        sliding_window=_sliding_window(layer),
        head_norms=any(name.endswith("self_attn.q_norm.weight") for name in checkpoint.names),
        biases=frozenset(
            _our_name(name).removesuffix(".bias") for name in checkpoint.names if name.endswith(".bias")
        ),
    )


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    """Return whether the head norms the feature before attention, as only EAGLE-3 does."""
    return any(_our_name(name) == "midlayer.hidden_norm.weight" for name in checkpoint.names)


def _captured(checkpoint: Checkpoint, theirs: Any) -> tuple[tuple[int, ...], bool]:
    """Return the hidden states that make the feature, and whether `fc` mixes them.

    At the top level the ids are Transformers' (and vLLM's and speculators'). In `eagle_config` an id means
    the output of that layer (SpecForge, SGLang, ModelOpt), which Transformers numbers one higher.
    """
    config, layers = checkpoint.config, theirs.num_hidden_layers
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        return (layers,), "fc.weight" in checkpoint.names
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        ids = [layer + 1 for layer in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
    ids = ids or [2, layers // 2, layers - 3]
    if not all(isinstance(layer, int) and 0 <= layer <= layers for layer in ids):
        raise checkpoint.error(
            "eagle_aux_hidden_state_layer_ids", f"{ids} are not among the model's {layers} layers"
        )
    width = checkpoint.tensor("fc.weight").shape[-1]
    if width != len(ids) * theirs.hidden_size:
        raise checkpoint.error(
            "fc.weight", f"takes {width} features, not the {theirs.hidden_size} of each of {len(ids)} layers"
        )
    return tuple(ids), True


def _sliding_window(layer: dict[str, Any]) -> int | None:
    slides = layer.get("use_sliding_window", True) and "sliding_attention" in (layer.get("layer_types") or ())
    return layer.get("sliding_window") if slides else None
