"""Standard rejection sampling (Leviathan et al. 2023; Chen et al. 2023), for chains and trees.

A token drawn from q is accepted with probability min(1, p / q); if it is not, the next of its siblings is
tried against what is left, the normalized (p - q)+, and so on (Miao et al. 2024, SpecInfer). For a token that
no chance chose q is 1 there and 0 elsewhere. What comes out has the target's distribution, whatever q is.
"""

from __future__ import annotations

from torch import Tensor

from speculation.verification.rejection import Odds


def decide(odds: Odds) -> tuple[list[int], Tensor]:
    """A `rejection.Rule`."""
    path: list[int] = []
    last, left, untouched = -1, odds.target[0], True
    for node in range(odds.draft.num_nodes):  # a node's children come after it
        if odds.draft.parent(node) != last:
            continue
        p, q, u = odds.nodes[node]
        if not untouched:
            p = float(left[odds.draft.token_ids[node]])
        untouched = u * q < p
        if untouched:
            path.append(node)
            last, left = node, odds.target[node + 1]
        else:
            left = odds.without(left, node)
    return path, left
