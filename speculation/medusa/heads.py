"""Medusa's heads, all of them for a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear.packed import PackedLinear, kernel_fault
from engine.loader import LoadedModel
from speculation.medusa.weights import HeadWeights


class MedusaHeads:
    """Their weights lie together: the first layer of all heads is one product, as they read the same input,
    each further layer one batched product, and an LM head that they share one product again.
    """

    def __init__(self, weights: HeadWeights, target: LoadedModel) -> None:
        self.num_heads = weights.num_heads
        self._vocab_size = target.vocab_size
        own = {"device": target.device, "dtype": target.dtype}
        self._biases = [None if bias is None else bias.to(**own).unsqueeze(1) for _, bias in weights.layers]
        self._layers: list[nn.Module] = [_Stacked(weight.to(**own)) for weight, _ in weights.layers]
        if self._layers:
            self._layers[0] = _FromOne(weights.layers[0][0].to(**own))
        lm_heads = weights.lm_heads.to(**own)
        self._lm_head: nn.Module = _linear(lm_heads[0]) if len(lm_heads) == 1 else _Stacked(lm_heads)
        self._scale = weights.logit_scale
        self._token_map = None if weights.token_map is None else weights.token_map.to(target.device)

    def logits(self, features: Tensor, count: int) -> Tensor:
        """Of the first `count` heads: [batch, count, vocab_size], from hidden states [batch, hidden_size].

        Tokens outside the heads' vocabulary have -inf.
        """
        states = features.expand(count, *features.shape)
        for layer, bias in zip(self._layers, self._biases, strict=True):
            product = layer(states)
            states = states + F.silu(product if bias is None else product + bias[:count])
        logits = self._lm_head(states).transpose(0, 1) * self._scale
        if self._token_map is None:
            return logits[..., : self._vocab_size]
        everything = logits.new_full((*logits.shape[:2], self._vocab_size), -torch.inf)
        return everything.index_copy_(2, self._token_map, logits)


class _FromOne(nn.Module):
    """A layer of every head, for states [heads, batch, hidden_size] that are the same for all heads."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._all = _linear(weights.flatten(0, 1))
        self._num_heads = len(weights)

    def forward(self, states: Tensor) -> Tensor:
        return self._all(states[0]).unflatten(1, (self._num_heads, -1)).transpose(0, 1)[: len(states)]


class _Stacked(nn.Module):
    """A layer of every head, each for its own states."""

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
