"""The loader of published DFlash drafters, in their own layout and in Speculators' layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from engine.devices.loaded_model import LoadedModel
from engine.devices.torch.operations import apply_norm
from engine.light_imports import load_kernels
from engine.linear.packed import linear_of
from engine.model.describe import describe
from engine.model.program import ModelProgram, Norm, Rotation
from engine.quantization.weight import CodeFormat
from speculation.checkpoint import (
    TABLES,
    Checkpoint,
    activation,
    draft_ids_of,
    lm_head_of,
    number,
    read_tensors,
    rope,
    round_draft,
)

_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "use_aux_hidden_state": True,
        "sample_from_anchor": False,
        "use_swa": False,
        "causal_head": False,
        "is_neox_style": True,
    }
)
"""Fields that must have these values: any other changes the computation in unsupported ways."""


@dataclass(eq=False)
class BlockDraft:
    """A drafter of blocks of `block_size` tokens: the last committed token, and a mask for each token to
    draft.

    `layers` are Qwen3's; `complete` gives them an embedding and an LM head. `context` makes their keys and
    values of the target's `hidden_layers`; `layer_windows` limits what their rows see (`BlockBackend`).
    `lm_head` is None if the target's serves, `draft_ids` if all can be drafted.
    """

    layers: Qwen3ForCausalLM
    context: Context
    hidden_layers: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    block_size: int
    mask_token_id: int
    max_positions: int
    lm_head: nn.Module | None
    draft_ids: Tensor | None
    embedding_scale: float
    logit_scale: float
    softcap: float

    def round(self, format: CodeFormat, target: LoadedModel) -> None:
        """Round the linear layers. Raise ConfigError if the format fits none."""
        own = nn.ModuleList([self.layers.model.layers, self.context])
        if self.lm_head is not None:
            own.append(self.lm_head)
        round_draft(own, format, target)
        self.lm_head = None if self.lm_head is None else own[2]

    def complete(self, target: LoadedModel) -> None:
        """Put the layers between the target's embedding and the LM head."""
        embedding = target.model.get_input_embeddings().weight
        self.layers.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
        self.layers.set_output_embeddings(self.lm_head or target.model.get_output_embeddings())

    def program(self) -> ModelProgram:
        return replace(describe(self.layers), embedding_multiplier=self.embedding_scale)


def load_dflash(model: str, target: LoadedModel) -> BlockDraft:
    """Load a drafter. Raise `ConfigError` that names the file and what does not fit."""
    checkpoint = Checkpoint(model)
    config = checkpoint.config
    layer = config.get("transformer_layer_config", config)
    fields = {**config, **(config.get("dflash_config") or {})}
    for name, only in _ONLY.items():
        if fields.get(name, only) != only:
            raise checkpoint.error(name, f"must be {only}, got {fields[name]!r}")
    theirs = target.model.config.get_text_config(decoder=True)
    width = theirs.hidden_size
    if number(checkpoint, layer, "hidden_size") != width:
        raise checkpoint.error("hidden_size", f"must be the model's {width}, got {layer['hidden_size']}")
    hidden_layers = _hidden_layers(checkpoint, fields, theirs.num_hidden_layers)
    windows = _windows(checkpoint, layer)
    layer_windows = _layer_windows(checkpoint, fields, windows)
    causal = [
        window if visible is None else 0 for window, visible in zip(windows, layer_windows, strict=True)
    ]
    own = _layer_config(checkpoint, layer, theirs, causal)
    layers, fc, norm = _read_layers(checkpoint, own, len(hidden_layers) * width, target)
    draft_ids = draft_ids_of(checkpoint, config.get("draft_vocab_size"), target)
    return BlockDraft(
        layers=layers,
        context=Context(fc, norm, layers.model.layers, own.rms_norm_eps),
        hidden_layers=hidden_layers,
        layer_windows=layer_windows,
        block_size=number(checkpoint, fields, "block_size", least=2),
        mask_token_id=_mask(checkpoint, fields, target),
        max_positions=max(layer.get("max_position_embeddings") or 0, target.max_model_len),
        lm_head=lm_head_of(checkpoint, width, draft_ids, target),
        draft_ids=draft_ids,
        embedding_scale=float(fields.get("input_embedding_scale") or 1.0),
        logit_scale=float(fields.get("output_multiplier") or fields.get("logit_scale") or 1.0),
        softcap=float(fields.get("final_logit_softcapping") or 0.0),
    )


def _hidden_layers(checkpoint: Checkpoint, fields: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the target's hidden states of the context, as Transformers numbers them.

    Speculators uses the same numbers, but takes the last state before the final norm, which is not supported.
    The original layout has the numbers of the layers whose outputs they are.
    """
    name = "aux_hidden_state_layer_ids"
    ids = fields.get(name)
    last = count - 1
    if ids is None:
        name = "target_layer_ids"
        ids = fields.get(name)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(each, int) and 0 <= each <= last for each in ids)
    ):
        raise checkpoint.error(name, f"must be a list of numbers from 0 to {last}, got {ids!r}")
    return tuple(each if name.startswith("aux") else each + 1 for each in ids)


def _windows(checkpoint: Checkpoint, layer: Mapping[str, Any]) -> list[int]:
    """Return the sliding window of each layer, 0 for none."""
    count = number(checkpoint, layer, "num_hidden_layers")
    types = layer.get("layer_types") or ["full_attention"] * count
    if len(types) != count:
        raise checkpoint.error("layer_types", f"must have {count} entries, has {len(types)}")
    slides = [kind == "sliding_attention" for kind in types]
    return [number(checkpoint, layer, "sliding_window") if each else 0 for each in slides]


def _layer_windows(
    checkpoint: Checkpoint, fields: Mapping[str, Any], windows: Sequence[int]
) -> tuple[int | None, ...]:
    """Return layers' windows, None for causal layers. By default layers with a window are causal."""
    causal = fields.get("is_causal", fields.get("causal"))
    if causal not in (None, True, False):
        raise checkpoint.error("is_causal", f"must be true or false, got {causal!r}")
    if causal is None and fields.get("sliding_window_non_causal"):
        causal = False
    return tuple(None if (window if causal is None else causal) else window for window in windows)


def _layer_config(
    checkpoint: Checkpoint, layer: Mapping[str, Any], theirs: Any, windows: Sequence[int]
) -> Qwen3Config:
    heads, width = number(checkpoint, layer, "num_attention_heads"), layer["hidden_size"]
    return Qwen3Config(
        vocab_size=1,
        hidden_size=width,
        intermediate_size=number(checkpoint, layer, "intermediate_size"),
        num_hidden_layers=len(windows),
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or width // heads,
        hidden_act=activation(checkpoint, layer),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_parameters=rope(checkpoint, layer, theirs),
        attention_bias=bool(layer.get("attention_bias")),
        layer_types=["sliding_attention" if window else "full_attention" for window in windows],
        use_sliding_window=any(windows),
        sliding_window=max(windows) or None,
    )


def _read_layers(
    checkpoint: Checkpoint, config: Qwen3Config, feature_size: int, target: LoadedModel
) -> tuple[Qwen3ForCausalLM, nn.Linear, Tensor]:
    """Return the decoder layers with their norm, and the context's linear layer and norm."""
    load_kernels()
    with torch.device("meta"):
        layers = Qwen3ForCausalLM(config)
        parts = nn.ModuleDict(
            {
                "layers": layers.model.layers,
                "norm": layers.model.norm,
                "fc": nn.Linear(feature_size, config.hidden_size, bias=False),
                "hidden_norm": type(layers.model.norm)(config.hidden_size),
            }
        )
    names = {name: name for name in checkpoint.names if name not in TABLES}
    tensors = read_tensors(checkpoint, parts.state_dict(), names)
    placed = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    parts.load_state_dict(placed, assign=True)
    parts.eval().requires_grad_(False)
    layers.model.rotary_emb = Qwen3RotaryEmbedding(config).to(target.device)
    return layers.eval(), parts["fc"], parts["hidden_norm"].weight


def _mask(checkpoint: Checkpoint, fields: Mapping[str, Any], target: LoadedModel) -> int:
    """Return the token whose embedding represents tokens to draft; it may be beyond the vocabulary."""
    rows, value = (
        len(target.model.get_input_embeddings().weight),
        number(checkpoint, fields, "mask_token_id", 0),
    )
    if value >= rows:
        raise checkpoint.error(
            "mask_token_id", f"{value} is not among the {rows} rows of the model's embedding"
        )
    return value


class Context(nn.Module):
    """The projections of hidden states to KV. `fc` and a norm make one vector of a token's hidden states;
    each layer projects its key and value from it as from its own normed input. One product serves all layers.
    """

    def __init__(self, fc: nn.Linear, norm: Tensor, layers: Sequence[Any], epsilon: float) -> None:
        """Join the projections of `layers`, Transformers' Qwen3 decoder layers."""
        super().__init__()
        self.fc = fc
        self._norm = Norm(norm, epsilon)
        attentions = [layer.self_attn for layer in layers]
        projections = [each for attention in attentions for each in (attention.k_proj, attention.v_proj)]
        biases = [each.bias for each in projections]
        bias = None if biases[0] is None else torch.cat(biases)
        self.products = linear_of(torch.cat([each.weight for each in projections]), bias)
        self._shape = len(attentions), 2, -1, attentions[0].head_dim
        weights = torch.stack([attention.k_norm.weight for attention in attentions])
        self._key_norm = Norm(weights.unsqueeze(1), epsilon)

    def attach(self, rotation: Rotation, positions: int, pool: Tensor) -> None:
        """Set the rotation for `positions`, and a pool [blocks, layers, 2, block_size, heads, head_dim]."""
        self._cosines, self._sines = rotation.tables(positions, self._norm.weight)
        self._pool = pool

    def write(self, hidden: Tensor, places: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """Write the KV of tokens with `hidden` states [rows, feature_size] at `places` [rows]."""
        products = self.products(apply_norm(self._norm, self.fc(hidden))).unflatten(-1, self._shape)
        keys, values = products.unbind(2)  # [rows, layers, heads, head_dim]
        keys = apply_norm(self._key_norm, keys)
        cosines, sines = (table[places, None, None] for table in (self._cosines, self._sines))
        low, high = keys.chunk(2, dim=-1)
        keys = keys * cosines + torch.cat([-high, low], dim=-1) * sines
        self._pool[blocks, :, :, offsets] = torch.stack([keys, values], dim=2)
