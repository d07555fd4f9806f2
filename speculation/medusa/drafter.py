"""Drafting with Medusa heads, as chains or static trees: one small product for all tokens of all requests."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.copies import Downloader, upload_to
from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault, linear_of, pack_linears
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig
from speculation.checkpoint import round_draft
from speculation.drawing import Drawing, best_of, rank
from speculation.last_state import LastStateDrafter
from speculation.medusa.weights import HeadWeights, read_heads


class MedusaDrafter(LastStateDrafter):
    """Head i proposes the i-th token after the sequence's last one, which has not been run yet: what the
    heads read is the target's final hidden state of the token before.

    A draft is the chain of the heads' best tokens, or with `tree` the nodes of a static tree. The heads do
    not see each other's tokens. Under coupled verification what they propose is chosen with the noise that
    the target will draw with.
    """

    def __init__(self, options: SpeculativeConfig, target: LoadedModel) -> None:
        super().__init__()
        assert options.model is not None
        hidden_size = target.model.config.get_text_config(decoder=True).hidden_size
        weights = read_heads(options.model, hidden_size, target.vocab_size)
        self.hidden_layers = (len(target.kv_group.layers),)
        format = None if options.quantization is None else CodeFormat(options.quantization)
        self._heads = MedusaHeads(weights, target, format)
        self._sampler = Sampler(target.vocab_size, target.device, target.eos_token_ids)
        self._drawing = Drawing(self._sampler, options.verification)
        self._upload, self._download = upload_to(target.device), Downloader(target.device)
        self._shares_noise = options.verification == "coupled"
        self._tree: StaticTree | None = None
        if options.tree:
            acceptance = weights.rank_acceptance or assumed_acceptance(weights.num_heads)
            self._tree = choose_tree(acceptance, options.tree_nodes)

    def _draft(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        if self._tree is None:
            return self._chains(sequences, rooms)
        return self._trees(self._tree, sequences, rooms)

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[SequenceState], depth: int) -> Tensor:
        """Return the first `depth` heads' logits, [sequences, depth, vocab_size]."""
        return self._heads.logits(self._last_states(sequences), depth)

    def _chains(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        logits = self._logits(sequences, min(max(rooms), self._heads.num_heads))
        return self._drawing.draft_at_once(sequences, rooms, logits)

    def _trees(
        self, tree: StaticTree, sequences: Sequence[SequenceState], rooms: Sequence[int]
    ) -> list[Draft]:
        depth = max(tree.depths[: max(rooms)]) + 1
        logits = self._logits(sequences, depth).flatten(0, 1)
        params = [sequence.params for sequence in sequences for _ in range(depth)]
        positions = [sequence.position + head for sequence in sequences for head in range(depth)]
        ranked = rank(logits, params, positions, self._upload, with_noise=self._shares_noise)
        best_first = best_of(*ranked, tree.num_ranks)[1].flatten()
        late = LateTokens(best_first, self._download)
        names = np.invert(np.arange(len(best_first))).reshape(len(sequences), depth, -1).tolist()
        return [tree.draft(its, room, late) for its, room in zip(names, rooms, strict=True)]


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


_ASSUMED_FIRST = (0.60, 0.45, 0.35, 0.30, 0.25)
"""How often each head's best token is right, where nobody measured: near what Cai et al. 2024 plot for
Vicuna's heads. Further heads are assumed to be as good as the last of these."""
_ASSUMED_RANKS = 10
_RARE = 1e-4
"""The least probability: a rank that was never right still may be."""


@dataclass(frozen=True)
class StaticTree:
    """Node i is the `ranks[i]`-th best token of head `depths[i]`, after node `parents[i]` or, if that is -1,
    after the sequence's last token. The nodes descend in their probability to be accepted, so that the first
    n are the best tree of n nodes.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def draft(self, ranked: Sequence[Sequence[int]], room: int, late: LateTokens | None = None) -> Draft:
        """The first `room` nodes, where `ranked[i]` are the tokens of head i, best first, or their names."""
        nodes = zip(self.depths[:room], self.ranks[:room], strict=True)
        return Draft([ranked[depth][rank] for depth, rank in nodes], self.parents[:room], late=late)


def choose_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The `num_nodes` nodes likeliest to be accepted; fewer if the heads have no more.

    `acceptance[i][r]` is the probability that the r-th best token of head i is the right one, independent of
    the other heads' as it seems (Cai et al. 2024, section 2.3.3): a node is accepted with the product of the
    probabilities on its way. A child's is less than its parent's and its better sibling's, so the best nodes
    are found one by one.
    """
    tree = StaticTree([], [], [])
    best_first: list[tuple[float, float, int, int, int]] = []

    def offer(before: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(acceptance) and rank < len(acceptance[depth]):
            path = before * max(acceptance[depth][rank], _RARE)
            heapq.heappush(best_first, (-path, before, parent, depth, rank))

    offer(1.0, -1, 0, 0)
    while best_first and len(tree.parents) < num_nodes:
        negative, before, parent, depth, rank = heapq.heappop(best_first)
        offer(-negative, len(tree.parents), depth + 1, 0)
        offer(before, parent, depth, rank + 1)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.ranks.append(rank)
    return tree


def assumed_acceptance(num_heads: int) -> list[list[float]]:
    """Each further rank is right in a third of the cases that are left: [heads][ranks]."""
    table = []
    for head in range(num_heads):
        first = _ASSUMED_FIRST[min(head, len(_ASSUMED_FIRST) - 1)]
        table.append([first, *((1 - first) / 3 * (2 / 3) ** rank for rank in range(_ASSUMED_RANKS - 1))])
    return table
