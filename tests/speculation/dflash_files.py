"""Writes small DFlash drafters in the published layouts, with random weights, and drafts with them in plain
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from tests.speculation.eagle_files import (
    DRAFT_VOCAB,
    FFN,
    HEADS,
    KV_HEADS,
    LAYERS,
    THETA,
    VOCAB,
    WIDTH,
    Published,
    attend,
    layer_config,
    normed,
    rotated,
    weights_of,
)

HEAD_DIM, BLOCK, MASK = 16, 6, 7
WINDOW = 12


def dflash(
    types: str = "ff",
    *,
    width: int = WIDTH,
    captured: tuple[int, ...] = (1, 4, 6),
    ids: Tensor | None = None,
    **fields: Any,
) -> Published:
    """Write the original layout. `types` has f for each layer with full attention, s for one with a window.
    `ids` are the tokens that can be drafted, if not all can.
    """
    weight = weights_of(torch.Generator().manual_seed(5))
    tensors = {
        "fc.weight": weight(width, len(captured) * width),
        "hidden_norm.weight": 1 + weight(width),
        "norm.weight": 1 + weight(width),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj": (width, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, width),
        "mlp.up_proj": (FFN, width),
        "mlp.down_proj": (width, FFN),
    }
    norms = {"q": HEAD_DIM, "k": HEAD_DIM}
    for number in range(len(types)):
        layer = f"layers.{number}"
        tensors |= {f"{layer}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": 1 + weight(size) for name, size in norms.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + weight(width)
    own = {"mask_token_id": MASK, "target_layer_ids": [each - 1 for each in captured]}
    config = layer_config(width, architectures=["DFlashDraftModel"], model_type="qwen3", dflash_config=own)
    config |= {"num_hidden_layers": len(types), "head_dim": HEAD_DIM, "rope_theta": THETA}
    config |= {"block_size": BLOCK, "num_target_layers": LAYERS}
    if "s" in types:
        kinds = {"f": "full_attention", "s": "sliding_attention"}
        config |= {"layer_types": [kinds[each] for each in types], "sliding_window": WINDOW}
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["lm_head.weight"] = weight(len(ids), width)
        config["draft_vocab_size"] = len(ids)
    return Published(config | fields, tensors, captured, is_eagle3=False, flags={"types": types})


def speculators(types: str = "ff", **fields: Any) -> Published:
    """Write the layout of speculators: a nested layer config, and Transformers' layer numbers."""
    random = torch.Generator().manual_seed(6)
    published = dflash(types, ids=torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values)
    config = published.config
    own = config.pop("dflash_config")
    config.pop("architectures")
    published.config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "block_size": config.pop("block_size"),
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "aux_hidden_state_layer_ids": list(published.captured),
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": config,
    } | fields
    return published


@dataclass
class PlainBlock:
    """A drafter without a cache. Rows with a window attend causally unless `whole`."""

    published: Published
    target: PreTrainedModel
    whole: bool = False
    _features: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def logits(self, token_ids: list[int], count: int, first: int = 0) -> Tensor:
        """Return the logits [count, vocab_size] of the tokens after `token_ids`. Context before place `first`
        is not seen.
        """
        weights = self.published.tensors
        context, newest = self._context(token_ids[:-1]), len(token_ids) - 1
        x = self.target.get_input_embeddings().weight[[token_ids[-1], *[MASK] * count]]
        places = torch.arange(newest + 1 + count)
        rows = places[newest:, None]
        for number, kind in enumerate(self.published.flags["types"]):
            seen = (places >= min(first, newest)).expand(count + 1, -1)
            if kind == "s":
                seen = seen & (places > rows - WINDOW)
                if not self.whole:
                    seen = seen & (places <= rows)
            x = self._layer(f"layers.{number}", x, context, seen)
        scored = normed(x[1:], weights["norm.weight"])
        if "d2t" not in weights:
            return self.target.get_output_embeddings()(scored)
        logits = torch.full((count, VOCAB), -torch.inf)
        ids = torch.arange(DRAFT_VOCAB) + weights["d2t"]
        return logits.index_copy(1, ids, linear(scored, weights["lm_head.weight"]))

    def draft(self, token_ids: list[int], count: int) -> list[int]:
        return self.logits(token_ids, count).argmax(-1).tolist()

    def _context(self, token_ids: list[int]) -> Tensor:
        known = tuple(token_ids)
        if known not in self._features:
            output = self.target(torch.tensor([token_ids]), output_hidden_states=True)
            joined = torch.cat([output.hidden_states[layer][0] for layer in self.published.captured], dim=-1)
            mixed = linear(joined, self.published.tensors["fc.weight"])
            self._features[known] = normed(mixed, self.published.tensors["hidden_norm.weight"])
        return self._features[known]

    def _layer(self, prefix: str, x: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        def weight(name: str) -> Tensor:
            return self.published.tensors[f"{prefix}.{name}.weight"]

        rows = normed(x, weight("input_layernorm"))
        both = torch.cat([context, rows])
        query = normed(
            linear(rows, weight("self_attn.q_proj")).view(-1, HEADS, HEAD_DIM), weight("self_attn.q_norm")
        )
        key = normed(
            linear(both, weight("self_attn.k_proj")).view(-1, KV_HEADS, HEAD_DIM), weight("self_attn.k_norm")
        )
        value = linear(both, weight("self_attn.v_proj")).view(-1, KV_HEADS, HEAD_DIM)
        attended = attend(rotated(query, len(context)), rotated(key, 0), value, seen)
        x = x + linear(attended.flatten(1), weight("self_attn.o_proj"))
        rows = normed(x, weight("post_attention_layernorm"))
        gated = silu(linear(rows, weight("mlp.gate_proj"))) * linear(rows, weight("mlp.up_proj"))
        return x + linear(gated, weight("mlp.down_proj"))
