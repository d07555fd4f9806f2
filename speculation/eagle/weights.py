"""Reads published heads: EAGLE-1 and 2, EAGLE-3 (official, SpecForge, `speculators`), EAGLE-3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend, LayerKv
from engine.kv.layout import DRAFT, Group, Segment
from engine.load.select import runner_of_head
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.speculation import Quantization
from speculation.checkpoint import Checkpoint, round_draft
from speculation.eagle.head import Head, HeadShape, head_program
from speculation.head_drafter import DraftHead
from speculation.published import (
    EMBEDDING,
    TABLES,
    activation,
    draft_ids_of,
    lm_head_of,
    number,
    own_table,
    read_tensors,
    rope,
)


class EagleHead(DraftHead):
    """`embedding` [vocab_size, hidden_size] and `lm_head`, of `draft_vocab_size` outputs, are None where the
    target's serve.
    """

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
        """Return embedding and LM head: the target's where the file has none of its own."""
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
        """The layers that are not the target's own. Raises ConfigError where the format fits none."""
        own = nn.ModuleList([self.head] if self.lm_head is None else [self.head, self.lm_head])
        round_draft(own, format, target)
        self.lm_head = own[1] if len(own) > 1 else None


def load_eagle(model: str, target: LoadedModel, quantization: Quantization | None = None) -> EagleHead:
    """Load a head in the target's dtype, on its device. Raises `ConfigError` that names the file and the
    tensor or field that does not fit.
    """
    checkpoint = Checkpoint(model)
    shape = read_shape(checkpoint, target)
    head = Head(shape)
    names = {_our_name(name): name for name in checkpoint.names if name not in TABLES}
    head.load_state_dict(read_tensors(checkpoint, head.state_dict(), names))
    draft_ids = draft_ids_of(checkpoint, shape.draft_vocab_size, target)
    for parameter in head.parameters():  # as in Transformers the rotation's frequencies stay float32
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
    """From config.json and the tensors' names and shapes."""
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
    """EAGLE-3 norms the feature before attention, which EAGLE-1 and 2 do not."""
    return any(_our_name(name) == "midlayer.hidden_norm.weight" for name in checkpoint.names)


def _captured(checkpoint: Checkpoint, theirs: Any) -> tuple[tuple[int, ...], bool]:
    """The hidden states that make the feature, and whether `fc` mixes them.

    At the top level the ids are Transformers' (and vLLM's and speculators'), in `eagle_config` they mean the
    output of that layer (SpecForge, SGLang, ModelOpt), which Transformers numbers one higher.
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
