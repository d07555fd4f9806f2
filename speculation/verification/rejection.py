"""Rejection sampling of drafts: what its rules share.

A drafted token is accepted by chance, with odds that the two models' probabilities give, and the token after
the accepted ones is drawn from what the drafts rejected there left of the target's distribution. Acceptance
and that last token have noise of their own, which no drafter knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from engine.sampler import Purpose, Sampler, draw, round_keys, uniform_noise
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
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


@dataclass(slots=True, eq=False)
class Stop:
    """The nodes that are accepted, in order, and those that were then rejected, against a share of the
    target's distribution after the accepted ones.
    """

    accepted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    share: float = 1.0


Rule = Callable[[Sequence[Odds]], list[Stop]]
"""Tells where each of a batch's drafts stops."""


def verify(sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Rule) -> list[Verdict]:
    """As `coupled.verify`, for sequences that all have a draft."""
    rows = DraftedRows(sequences)
    target = sampler.probabilities(logits, rows.sampling)
    failed = target.amax(dim=1) == 0
    target.masked_fill_(failed.unsqueeze(1), 1.0)  # something to draw from: the verdicts tell of them
    odds, failed_rows = _odds(rows, target, failed)
    stops = rule(odds)
    positions = [sequence.position + len(s.accepted) for sequence, s in zip(sequences, stops, strict=True)]
    keys = noise_keys(sequences, positions, Purpose.RECOVERY, target.device)
    last_tokens = draw(left_over(odds, stops), keys).tolist()
    decisions = [
        Decision(stop.accepted, last_token, _after_probes(each))
        for stop, last_token, each in zip(stops, last_tokens, odds, strict=True)
    ]
    return rows.conclude(decisions, logits, failed_rows, sampler)


def left_over(odds: Sequence[Odds], stops: Sequence[Stop]) -> Tensor:
    """float32 [sequences, vocab_size]: what the rejected nodes left of the target's distributions.

    Each takes away the probabilities that it was drawn with; what remains is normalized.
    """
    last_rows = [stop.accepted[-1] + 1 if stop.accepted else 0 for stop in stops]
    left = torch.stack([each.target[row] for each, row in zip(odds, last_rows, strict=True)])
    left *= left.new_tensor([stop.share for stop in stops]).unsqueeze(1)
    for number in range(max(len(stop.rejected) for stop in stops)):
        concerned = [index for index, stop in enumerate(stops) if number < len(stop.rejected)]
        nodes = [stops[index].rejected[number] for index in concerned]
        before = left[concerned]
        after = _subtract(before, [odds[index].draft for index in concerned], nodes)
        total = after.sum(dim=1, keepdim=True)
        left[concerned] = torch.where(total > 0, after / total, before)  # rounding may leave nothing
    return left


def _subtract(weights: Tensor, drafts: list[Draft], nodes: list[int]) -> Tensor:
    """[n, vocab_size]: the weights less what the node of each row's draft was drawn with, at least 0."""
    left = weights.clone()
    drawn: dict[int, Tensor] = {}
    certain: dict[int, int] = {}
    for row, (draft, node) in enumerate(zip(drafts, nodes, strict=True)):
        if draft.distributions is None:
            certain[row] = draft.token_ids[node]
        else:
            drawn[row] = draft.distributions[node]
    left[list(certain), list(certain.values())] = 0.0
    if drawn:
        rows = list(drawn)
        left[rows] = (left[rows] - torch.stack(list(drawn.values()))).clamp_min_(0.0)
    return left


def noise_keys(
    sequences: Sequence[SequenceState], positions: Sequence[int], purpose: Purpose, device: torch.device
) -> Tensor:
    """int64 [n]: for the noise at a position of each sequence's round, which begins at its next token."""
    seeds = [sequence.params.seed for sequence in sequences]
    starts = [sequence.position for sequence in sequences]
    columns = torch.tensor([seeds, starts, list(positions)], dtype=torch.int64, device=device)
    return round_keys(columns[0], columns[1], columns[2], purpose)


def _odds(rows: DraftedRows, target: Tensor, failed: Tensor) -> tuple[list[Odds], list[int]]:
    """And the rows that failed, read from the device with the odds."""
    drafts: list[Draft] = []
    owners: list[SequenceState] = []
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
    q = _drawn_with(drafts, tokens)
    drawn = torch.stack([p.double(), q.double(), uniform_noise(keys, tokens)], dim=1)
    told = torch.cat([drawn.flatten(), failed.double()]).tolist()
    nodes = iter([told[first : first + 3] for first in range(0, drawn.numel(), 3)])
    odds = [
        Odds(draft, target[span], list(islice(nodes, draft.num_nodes)))
        for draft, span in zip(drafts, rows.spans, strict=True)
    ]
    return odds, [row for row, fails in enumerate(told[drawn.numel() :]) if fails]


def _drawn_with(drafts: list[Draft], tokens: Tensor) -> Tensor:
    """float32 [nodes of all]: the probability that each was drawn with."""
    probabilities = torch.ones(len(tokens), device=tokens.device)
    first = 0
    rows: list[int] = []
    distributions: list[Tensor] = []
    for draft in drafts:
        if draft.distributions is not None:
            rows += range(first, first + draft.num_nodes)
            distributions.append(draft.distributions)
        first += draft.num_nodes
    if rows:
        drawn = torch.cat(distributions).gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
        probabilities[rows] = drawn.clamp_min_(torch.finfo(torch.float32).tiny)
    return probabilities


def _after_probes(odds: Odds) -> list[int]:
    if not odds.draft.probes:
        return []
    return odds.target[1 + odds.draft.num_nodes :].argmax(dim=1).tolist()
