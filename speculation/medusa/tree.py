"""Which ranks of which heads to draft, when a tree may be drafted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens

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
