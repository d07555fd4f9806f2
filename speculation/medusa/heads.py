"""Medusa's heads, all of them for a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault, linear_of, pack_linears
from engine.quantization.weight import CodeFormat
from speculation.medusa.weights import HeadWeights
from speculation.rounding import round_draft


class MedusaHeads(nn.Module):
    """Their weights lie together: the first layer of all heads is one product, as they read the same input,
    each further layer one batched product, and an LM head that they share one product again. Rounded, further
    layers are a product for each head.
    """

    def __init__(self, weights: HeadWeights, target: LoadedModel, format: CodeFormat | None = None) -> None:
        """Weights are rounded to the `format`, if any. Raises ConfigError where it does not fit them."""
        super().__init__()
        self.num_heads = weights.num_heads
        self._vocab_size = target.vocab_size
        own = {"device": target.device, "dtype": target.dtype}
        self._biases = [None if bias is None else bias.to(**own).unsqueeze(1) for _, bias in weights.layers]
        each_for_its_own = _Stacked if format is None else _Each
        first, further = weights.layers[:1], weights.layers[1:]
        self._layers = nn.ModuleList([_FromOne(weight.to(**own)) for weight, _ in first])
        self._layers.extend(each_for_its_own(weight.to(**own)) for weight, _ in further)
        lm_heads = weights.lm_heads.to(**own)
        self._lm_head = linear_of(lm_heads[0]) if len(lm_heads) == 1 else each_for_its_own(lm_heads)
        if format is not None:
            round_draft(self, format, target)
        if kernel_fault(target.device, target.dtype) is None:
            pack_linears(self)
        self._scale = weights.logit_scale
        self._token_map = None if weights.token_map is None else weights.token_map.to(target.device)

    def logits(self, features: Tensor, count: int) -> Tensor:
        """Return the first `count` heads' logits [batch, count, vocab_size].

        `features` are hidden states [batch, hidden_size]. Tokens outside the heads' vocabulary have -inf.
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
        self._all = linear_of(weights.flatten(0, 1))
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


class _Each(nn.Module):
    """A layer of every head with a product for each, which can be quantized."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._heads = nn.ModuleList(map(linear_of, weights))

    def forward(self, states: Tensor) -> Tensor:
        return torch.stack([head(own) for head, own in zip(self._heads, states, strict=False)])
