"""Rejection sampling of drafts: what its rules share.

A drafted token is accepted by chance, with odds that the two models' probabilities give, and the token after
the accepted ones is drawn from what the drafts rejected there left of the target's distribution. Acceptance
and that last token have noise of their own, which no drafter knows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from engine.sampler import Purpose, Sampler, draw, uniform_noise
from engine.sequence import Sequence
from engine.speculator import Draft, Verdict
from speculation.rounds import noise_keys
from speculation.verification.rows import Decision, DraftedRows


@dataclass(slots=True, eq=False)
class Odds:
    """The chances of one sequence's draft.

    `target` [rows, vocab_size], float32: the model's distributions after the last token and after each
    drafted one. `nodes` has for each node the probability that the model gives its token after its parent,
    the one that it was drawn with (1 where no chance was involved), and a number that is uniform in (0, 1).
    """

    draft: Draft
    target: Tensor
    nodes: list[list[float]]

    def without(self, weights: Tensor, node: int) -> Tensor:
        """What the rejected node leaves of `weights` [vocab_size]: all that exceeds the probabilities that it
        was drawn with, normalized.
        """
        if self.draft.distributions is None:
            left = weights.clone()
            left[self.draft.token_ids[node]] = 0.0
        else:
            left = (weights - self.draft.distributions[node]).clamp_min_(0.0)
        total = left.sum()
        return torch.where(total > 0, left / total, weights)  # rounding alone can leave nothing

    def after_probes(self) -> list[int]:
        """The model's likeliest tokens there."""
        if not self.draft.probes:
            return []
        return self.target[1 + self.draft.num_nodes :].argmax(dim=1).tolist()


Rule = Callable[[Odds], tuple[list[int], Tensor]]
"""Says which nodes are accepted, and gives weights [vocab_size] for the token after them."""


def verify(sequences: Many[Sequence], logits: Tensor, sampler: Sampler, rule: Rule) -> list[Verdict]:
    """As `coupled.verify`, for sequences that all have a draft."""
    rows = DraftedRows(sequences)
    target = sampler.probabilities(logits, rows.sampling)
    failed_rows = (target.amax(dim=1) == 0).nonzero()[:, 0].tolist()
    target[failed_rows] = 1.0
    odds = _odds(rows, target)
    accepted, weights = zip(*map(rule, odds), strict=True)
    positions = [sequence.position + len(path) for sequence, path in zip(sequences, accepted, strict=True)]
    keys = noise_keys(sequences, positions, Purpose.RECOVERY, target.device)
    last_tokens = draw(torch.stack(weights), keys).tolist()
    decisions = [
        Decision(path, last_token, each.after_probes())
        for path, last_token, each in zip(accepted, last_tokens, odds, strict=True)
    ]
    return rows.conclude(decisions, logits, failed_rows, sampler)


def _odds(rows: DraftedRows, target: Tensor) -> list[Odds]:
    drafts: list[Draft] = []
    owners: list[Sequence] = []
    parents: list[int] = []
    token_ids: list[int] = []
    for sequence, span in zip(rows.sequences, rows.spans, strict=True):
        assert sequence.draft is not None
        draft = sequence.draft
        drafts.append(draft)
        owners += [sequence] * draft.num_nodes
        parents += (span.start + 1 + draft.parent(node) for node in range(draft.num_nodes))
        token_ids += draft.token_ids[: draft.num_nodes]
    tokens = torch.tensor(token_ids, device=target.device)
    positions = [rows.sampling[parent].position for parent in parents]
    keys = noise_keys(owners, positions, Purpose.ACCEPTANCE, target.device)
    p = target[torch.tensor(parents, device=target.device), tokens]
    q = torch.cat([_drawn_with(draft, target.device) for draft in drafts])
    nodes = iter(torch.stack([p.double(), q.double(), uniform_noise(keys, tokens)], dim=1).tolist())
    return [
        Odds(draft, target[span], list(islice(nodes, draft.num_nodes)))
        for draft, span in zip(drafts, rows.spans, strict=True)
    ]


def _drawn_with(draft: Draft, device: torch.device) -> Tensor:
    """float32 [nodes]: the probability that each was drawn with."""
    if draft.distributions is None:
        return torch.ones(draft.num_nodes, device=device)
    tokens = torch.tensor(draft.token_ids[: draft.num_nodes], device=device)
    probabilities = draft.distributions.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return probabilities.clamp_min(torch.finfo(torch.float32).tiny)  # none was drawn with 0
