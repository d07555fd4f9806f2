"""Medusa's heads, all of them for a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear.packed import PackedLinear, kernel_fault
from engine.loader import LoadedModel
from speculation.medusa.weights import HeadWeights


class MedusaHeads:
    """Their weights lie stacked, so that each layer of all heads is one batched product. If they share an LM
    head, that is one product for all of their rows.
    """

    def __init__(self, weights: HeadWeights, target: LoadedModel) -> None:
        self.num_heads = weights.num_heads
        self._vocab_size = target.vocab_size
        self._layers = [
            (
                weight.to(target.device, target.dtype).transpose(1, 2),
                None if bias is None else bias.to(target.device, target.dtype).unsqueeze(1),
            )
            for weight, bias in weights.layers
        ]
        lm_heads = weights.lm_heads.to(target.device, target.dtype)
        self._lm_head: nn.Module = _linear(lm_heads[0]) if len(lm_heads) == 1 else _Stacked(lm_heads)
        self._scale = weights.logit_scale
        self._token_map = None if weights.token_map is None else weights.token_map.to(target.device)

    def logits(self, features: Tensor, count: int) -> Tensor:
        """Of the first `count` heads: [batch, count, vocab_size], from hidden states [batch, hidden_size].

        Tokens outside the heads' vocabulary have -inf.
        """
        states = features.expand(count, *features.shape)
        for weight, bias in self._layers:
            product = torch.bmm(states, weight[:count])
            states = states + F.silu(product if bias is None else product + bias[:count])
        logits = self._lm_head(states).transpose(0, 1) * self._scale
        if self._token_map is None:
            return logits[..., : self._vocab_size]
        everything = logits.new_full((*logits.shape[:2], self._vocab_size), -torch.inf)
        everything[..., self._token_map] = logits
        return everything


class _Stacked(nn.Module):
    """An LM head for each of the heads."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._weights = weights.transpose(1, 2)

    def forward(self, states: Tensor) -> Tensor:
        return torch.bmm(states, self._weights[: len(states)])


def _linear(weight: Tensor) -> nn.Module:
    rows, hidden_size = weight.shape
    linear = nn.Linear(hidden_size, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(linear) if kernel_fault(weight.device, weight.dtype) is None else linear
