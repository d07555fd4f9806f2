"""Keys and values of a text for all layers of a block drafter, made of the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.devices.torch.operations import apply_norm
from engine.linear.packed import linear_of
from engine.model.program import Norm, Rotation


class Context(nn.Module):
    """`fc` and a norm make one vector of a token's hidden states, from which each layer projects its key and
    value as if the vector were the layer's normed input. All layers' products are one.
    """

    def __init__(self, fc: nn.Linear, norm: Tensor, layers: Sequence[Any], epsilon: float) -> None:
        """`layers` are Transformers' Qwen3 decoder layers."""
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
        """Get angles of so many positions, and a pool [blocks, layers, 2, block_size, heads, head_dim]."""
        self._cosines, self._sines = rotation.tables(positions, self._norm.weight)
        self._pool = pool

    def write(self, hidden: Tensor, places: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        """Write the KV of tokens with these `hidden` states [rows, feature_size] at their `places` [rows],
        which lie at `offsets` of `blocks`.
        """
        products = self.products(apply_norm(self._norm, self.fc(hidden))).unflatten(-1, self._shape)
        keys, values = products.unbind(2)  # [rows, layers, heads, head_dim]
        keys = apply_norm(self._key_norm, keys)
        cosines, sines = (table[places, None, None] for table in (self._cosines, self._sines))
        low, high = keys.chunk(2, dim=-1)
        keys = keys * cosines + torch.cat([-high, low], dim=-1) * sines
        self._pool[blocks, :, :, offsets] = torch.stack([keys, values], dim=2)
