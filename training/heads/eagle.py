"""EAGLE-3 heads in training (Li et al. 2025): their shape, and the published layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speculation.eagle import Head, HeadShape, head_program
from training.heads.contract import HeadOptions, Target, write_head
from training.heads.unrolled import DEFAULT_DEPTH, UnrolledTraining

DRAFT_VOCABULARY = 8192
LARGEST_SHARE = 0.1
"""The largest share of the target's parameters in a head. A larger head costs more time than it saves."""


def build_eagle3(target: Target, options: HeadOptions) -> Eagle3Training:
    """Build a head of a limited share of the target. Raises `ConfigError` that names the option."""
    size = options.draft_vocab_size or min(DRAFT_VOCABULARY, target.vocab_size)
    room = target.model.num_parameters() * LARGEST_SHARE
    own_lm_head = size * target.hidden_size <= room / 2
    if own_lm_head:
        room -= size * target.hidden_size
    return Eagle3Training(target, _shape(target, size, room), options.depth or DEFAULT_DEPTH, own_lm_head)


def _shape(target: Target, draft_vocab_size: int, room: float) -> HeadShape:
    """Return the head's shape, with at most `room` parameters in its layer and projection."""
    config = target.model.config.get_text_config(decoder=True)
    width, heads = target.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    captured = captured_layers(target.num_layers)
    inner = getattr(config, "intermediate_size", None) or 4 * width
    layer = width * head_dim * (3 * heads + 4 * kv_heads) + 3 * width * inner
    share = max(0.0, min(1.0, (room - len(captured) * width**2) / layer))
    num_heads = max(1, round(heads * share))
    most = max(1, round(kv_heads * share))
    return HeadShape(
        is_eagle3=True,
        captured=captured,
        feature_size=len(captured) * width,
        hidden_size=width,
        intermediate_size=max(1, int(inner * share / 32)) * 32,
        num_heads=num_heads,
        num_kv_heads=max(count for count in range(1, most + 1) if num_heads % count == 0),
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
        rope=_rope(getattr(config, "rope_parameters", None)),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        draft_vocab_size=draft_vocab_size,
        norm_output=True,
    )


def _rope(theirs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the target's rope parameters, for whole heads; plain rope if the target has none or several."""
    if not theirs or "rope_theta" not in theirs:
        return {"rope_type": "default", "rope_theta": 1e4}
    return {name: value for name, value in theirs.items() if name != "partial_rotary_factor"}


def captured_layers(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, as EAGLE-3's authors choose them. For a shallow model, return
    the layers just before the last one, so that the last layer need not compute all rows of a prompt.
    """
    if num_layers < 8:
        high = min(num_layers, max(2, num_layers - 1))
        return tuple(range(max(0, high - 2), high + 1))
    return 2, num_layers // 2, num_layers - 3


class Eagle3Training(UnrolledTraining):
    """An EAGLE-3 head in training. Initially its layer adds nothing."""

    def __init__(self, target: Target, shape: HeadShape, depth: int, own_lm_head: bool) -> None:
        assert shape.draft_vocab_size is not None
        self._shape = shape
        head = Head(shape).to(target.device)
        for projection in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
            nn.init.zeros_(projection.weight)
        super().__init__(target, head, shape.captured, depth, shape.draft_vocab_size, own_lm_head)
        self.run_by(partial(head_program, head), head.combine, shape.max_positions + depth)

    def save(self, folder: Path) -> None:
        """Save in the official EAGLE-3 layout."""
        shape = self._shape
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "vocab_size": self._target.vocab_size,
            "draft_vocab_size": len(self.draft_ids),
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": shape.hidden_act,
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": shape.rope,
            "tie_word_embeddings": False,
            "logit_scale": 1.0 if self._owns_lm_head else self._target.logit_scale,
            "eagle_aux_hidden_state_layer_ids": list(shape.captured),
            "norm_output": shape.norm_output,
        }
        write_head(folder, config, dict(self.head_tensors()) | self._draft_vocabulary())

    def _draft_vocabulary(self) -> dict[str, Tensor]:
        """Return the LM head, if the head has its own, and the maps between both vocabularies."""
        found: dict[str, Tensor] = {}
        if self._owns_lm_head:
            found["lm_head.weight"] = self._lm_head.weight.detach().to(self._target.dtype)
        if len(self.draft_ids) < self._target.vocab_size:
            numbers = torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            found["d2t"] = self.draft_ids - numbers
            found["t2d"] = torch.zeros(self._target.vocab_size, dtype=torch.bool)
            found["t2d"][self.draft_ids.cpu()] = True
        return found
