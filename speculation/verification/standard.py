"""Standard rejection sampling (Leviathan et al. 2023; Chen et al. 2023), for chains and trees.

A token drawn from q is accepted with probability min(1, p / q); if it is not, the next of its siblings is
tried against what is left, the normalized (p - q)+, and so on (Miao et al. 2024, SpecInfer). For a token that
no chance chose q is 1 there and 0 elsewhere. What comes out has the target's distribution, whatever q is.
"""

from __future__ import annotations

from collections.abc import Sequence

from speculation.verification.rejection import Odds, Stop, left_over


def decide(odds: Sequence[Odds]) -> list[Stop]:
    """A `rejection.Rule`."""
    return [walk(each) for each in odds]


def walk(odds: Odds) -> Stop:
    draft, stop = odds.draft, Stop()
    last, mass = -1, 1.0
    for node, (p, q, u) in enumerate(odds.nodes):  # a node's children come after it
        if draft.parent(node) != last:
            continue
        if stop.rejected and draft.distributions is not None:
            p = float(left_over([odds], [stop])[0, draft.token_ids[node]])
        if u * q * mass < p:
            stop.accepted.append(node)
            stop.rejected.clear()
            last, mass = node, 1.0
        else:
            stop.rejected.append(node)
            if draft.distributions is None:
                mass -= p  # what is left of the siblings' distribution, not normalized
    return stop
