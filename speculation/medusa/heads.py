"""Medusa's heads, all of them for a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear.packed import PackedLinear, kernel_fault
from engine.loader import LoadedModel
from speculation.medusa.weights import HeadWeights


class MedusaHeads:
    """Their weights lie stacked, so that each layer of all heads is one batched product."""

    def __init__(self, weights: HeadWeights, target: LoadedModel) -> None:
        self.num_heads = weights.num_heads
        self._vocab_size = target.vocab_size
        self._device, self._dtype = target.device, target.dtype
        self._layers = [
            (
                self._own(weight).transpose(1, 2),
                None if bias is None else self._own(bias).unsqueeze(1),
            )
            for weight, bias in weights.layers
        ]
        self._scale = weights.logit_scale
        self._token_map = None if weights.token_map is None else weights.token_map.to(self._device)
        self._project = self._projection(weights.lm_heads, target)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)

    def _projection(self, lm_heads: Tensor | None, target: LoadedModel) -> Callable[[Tensor], Tensor]:
        """From states [heads, batch, hidden_size] to logits [heads, batch, rows]."""
        if lm_heads is None:
            output = target.model.get_output_embeddings()
            if self._token_map is None:
                return lambda states: target.model.get_output_embeddings()(states)  # as packed by then
            lm_heads = output.weight[self._token_map].unsqueeze(0)
        if len(lm_heads) == 1:
            return _linear(self._own(lm_heads[0]))
        stacked = self._own(lm_heads).transpose(1, 2)
        return lambda states: torch.bmm(states, stacked[: len(states)])

    def logits(self, features: Tensor, count: int) -> Tensor:
        """Of the first `count` heads: [batch, count, vocab_size], from hidden states [batch, hidden_size].

        Tokens outside the heads' vocabulary have -inf.
        """
        states = features.expand(count, *features.shape)
        for weight, bias in self._layers:
            product = torch.bmm(states, weight[:count])
            states = states + F.silu(product if bias is None else product + bias[:count])
        logits = self._project(states).transpose(0, 1)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._token_map is None:
            return logits[..., : self._vocab_size]
        everything = logits.new_full((*logits.shape[:2], self._vocab_size), -torch.inf)
        everything[..., self._token_map] = logits
        return everything


def _linear(weight: Tensor) -> nn.Module:
    rows, hidden_size = weight.shape
    linear = nn.Linear(hidden_size, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(linear) if kernel_fault(weight.device, weight.dtype) is None else linear
