"""Block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"), for chains.

The tokens of a chain are judged together, so that an unlikely one can be made up for by likelier ones: no
rule keeps more of them in expectation. Trees fall to the standard rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from speculation.verification import standard
from speculation.verification.rejection import Odds, Stop


def decide(odds: Sequence[Odds]) -> list[Stop]:
    """A `rejection.Rule`."""
    chains = [each for each in odds if each.draft.parents is None]
    stops = dict(zip(chains, _judge(chains), strict=True))
    return [stops[each] if each in stops else standard.walk(each) for each in odds]


def _judge(chains: Sequence[Odds]) -> list[Stop]:
    """Each of a chain's lengths has a chance h_i to be kept; the greatest that makes use of it counts."""
    shares = [_shares(chain) for chain in chains]
    stops = []
    for chain, share, mass in zip(chains, shares, _masses(chains, shares), strict=True):
        chances = [m / (m + 1.0 - s) if m > 0 else 0.0 for s, m in zip(share[1:-1], mass, strict=True)]
        chances.append(share[-1])
        kept = [i + 1 for i, (_, _, u) in enumerate(chain.nodes) if u < chances[i]]
        length = kept[-1] if kept else 0
        rejected = list(range(length, len(chain.nodes)))[:1]
        stops.append(Stop(list(range(length)), rejected, share[length]))
    return stops


def _shares(chain: Odds) -> list[float]:
    """rho_i, i from 0 to the chain's length: how far the first i tokens are as likely as they were drawn."""
    shares = [1.0]
    for p, q, _ in chain.nodes:
        shares.append(min(1.0, shares[-1] * p / q))
    return shares


def _masses(chains: Sequence[Odds], shares: Sequence[Sequence[float]]) -> list[list[float]]:
    """M_i, i from 1 to less than each chain's length: the sum of (rho_i p - q)+ over all that may follow."""
    masses = [
        [s * (1.0 - p) for s, (p, _, _) in zip(share[1:-1], chain.nodes[1:], strict=True)]
        for chain, share in zip(chains, shares, strict=True)
    ]  # right where no chance was involved
    drawn = [i for i, chain in enumerate(chains) if chain.draft.distributions is not None]
    if drawn:
        target = torch.cat([chains[i].target[1 : len(chains[i].nodes)] for i in drawn])
        taken = [d[1:] for d in (chain.draft.distributions for chain in chains) if d is not None]
        scale = target.new_tensor([s for i in drawn for s in shares[i][1:-1]]).unsqueeze(1)
        found = iter((scale * target - torch.cat(taken)).clamp_min_(0.0).sum(dim=1).tolist())
        for i in drawn:
            masses[i] = list(islice(found, len(masses[i])))
    return masses
