"""Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"), for chains.

The tokens of a chain are judged together, so that an unlikely one can be made up for by likelier ones: no
rule keeps more of them in expectation. Trees fall to the standard rule.
"""

from __future__ import annotations

from torch import Tensor

from speculation.verification import standard
from speculation.verification.rejection import Odds


def decide(odds: Odds) -> tuple[list[int], Tensor]:
    """A `rejection.Rule`."""
    draft, target = odds.draft, odds.target
    if draft.parents is not None:
        return standard.decide(odds)
    shares = _shares(odds)
    chances = _chances(odds, shares)
    kept = [node + 1 for node, (_, _, u) in enumerate(odds.nodes) if u < chances[node]]
    num_accepted = max(kept, default=0)
    left = target[num_accepted]
    if num_accepted < draft.num_nodes:
        left = odds.without(shares[num_accepted] * left, num_accepted)
    return list(range(num_accepted)), left


def _shares(odds: Odds) -> list[float]:
    """rho_i, i from 0 to the chain's length: how far the first i tokens are as likely as they were drawn."""
    shares = [1.0]
    for p, q, _ in odds.nodes:
        shares.append(min(1.0, shares[-1] * p / q))
    return shares


def _chances(odds: Odds, shares: list[float]) -> list[float]:
    """h_i, i from 1 to the chain's length: the chance to keep the first i tokens, if not more."""
    chances = []
    for share, mass in zip(shares[1:-1], _masses(odds, shares), strict=True):
        chances.append(mass / (mass + 1.0 - share) if mass > 0 else 0.0)
    return [*chances, shares[-1]]


def _masses(odds: Odds, shares: list[float]) -> list[float]:
    """M_i, i from 1 to less than the chain's length: the sum of (rho_i p - q)+ over all that may follow."""
    inner = shares[1:-1]
    drawn_from = odds.draft.distributions
    if drawn_from is None:
        return [share * (1.0 - p) for share, (p, _, _) in zip(inner, odds.nodes[1:], strict=True)]
    scale = odds.target.new_tensor(inner).unsqueeze(1)
    target = odds.target[1 : odds.draft.num_nodes]
    return (scale * target - drawn_from[1:]).clamp_min_(0.0).sum(dim=1).tolist()
