"""Rejection sampling of drafts by torch's operators, by one of two rules.

A draft token is accepted with a probability that follows from the two models' probabilities, and the token
after the accepted ones is drawn from what the rejected tokens leave of the target's distribution. Acceptance
and that last token have noise of their own, which no drafter knows.

`standard` (Leviathan et al. 2023; Chen et al. 2023), for chains and trees: a token drawn from q is accepted
with probability min(1, p / q). If it is rejected, its next sibling is tried against what is left, the
normalized (p - q)+, and so on (Miao et al. 2024, SpecInfer). For a token chosen without chance, q is 1 there
and 0 elsewhere. The output has the target's distribution, whatever q is.

`block` (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"), for chains: their tokens are
judged together, so that likelier ones can make up for an unlikely one; no rule keeps more of them in
expectation. Trees are judged by the standard rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from engine.sampler import Purpose, Sampler, draw, round_keys, uniform_noise
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification.rows import Decision, DraftedRows


@dataclass(slots=True, eq=False)
class DraftProbabilities:
    """The probabilities of one sequence's draft.

    `target` [rows, vocab_size], float32: the model's distributions after the last token and after each draft
    token. `nodes` has for each node the probability that the model gives its token after its parent, the
    probability that it was drawn with (1 without chance), and a uniform number in (0, 1).
    """

    draft: Draft
    target: Tensor
    nodes: list[list[float]]


@dataclass(slots=True, eq=False)
class Stop:
    """Accepted nodes, and those then rejected against a `share` of the target's distribution."""

    accepted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    share: float = 1.0


def verify(
    sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Verification
) -> list[Verdict]:
    """Verify like `verify_coupled`, for sequences that all have a draft."""
    rows = DraftedRows(sequences)
    target = sampler.probabilities(logits, rows.sampling)
    failed = target.amax(dim=1) == 0
    target.masked_fill_(failed.unsqueeze(1), 1.0)  # something to draw from; the verdicts report these rows
    odds, failed_rows = _odds(rows, target, failed)
    stops = _stops_of_blocks(odds) if rule == "block" else [_walk(each) for each in odds]
    positions = [sequence.position + len(s.accepted) for sequence, s in zip(sequences, stops, strict=True)]
    keys = noise_keys(sequences, positions, Purpose.RECOVERY, target.device)
    last_tokens = draw(left_over(odds, stops), keys).tolist()
    decisions = [
        Decision(stop.accepted, last_token, _after_probes(each))
        for stop, last_token, each in zip(stops, last_tokens, odds, strict=True)
    ]
    return rows.conclude(decisions, logits, failed_rows, sampler)


def _walk(odds: DraftProbabilities) -> Stop:
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


def _stops_of_blocks(odds: Sequence[DraftProbabilities]) -> list[Stop]:
    chains = [each for each in odds if each.draft.parents is None]
    stops = dict(zip(chains, _judge(chains), strict=True))
    return [stops[each] if each in stops else _walk(each) for each in odds]


def _judge(chains: Sequence[DraftProbabilities]) -> list[Stop]:
    """Return the stops by the block rule: length i is kept with chance h_i, and the greatest counts."""
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


def _shares(chain: DraftProbabilities) -> list[float]:
    """Return rho_i for i from 0 to the chain's length: the target's probability of the first i tokens
    relative to the probability that they were drawn with, capped at 1 after each token.
    """
    shares = [1.0]
    for p, q, _ in chain.nodes:
        shares.append(min(1.0, shares[-1] * p / q))
    return shares


def _masses(chains: Sequence[DraftProbabilities], shares: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return M_i, i from 1 to less than each chain's length: the sum of (rho_i p - q)+ over next tokens."""
    masses = [
        [s * (1.0 - p) for s, (p, _, _) in zip(share[1:-1], chain.nodes[1:], strict=True)]
        for chain, share in zip(chains, shares, strict=True)
    ]  # correct for tokens chosen without chance
    drawn = [i for i, chain in enumerate(chains) if chain.draft.distributions is not None]
    if drawn:
        target = torch.cat([chains[i].target[1 : len(chains[i].nodes)] for i in drawn])
        taken = [d[1:] for d in (chain.draft.distributions for chain in chains) if d is not None]
        scale = target.new_tensor([s for i in drawn for s in shares[i][1:-1]]).unsqueeze(1)
        found = iter((scale * target - torch.cat(taken)).clamp_min_(0.0).sum(dim=1).tolist())
        for i in drawn:
            masses[i] = list(islice(found, len(masses[i])))
    return masses


def left_over(odds: Sequence[DraftProbabilities], stops: Sequence[Stop]) -> Tensor:
    """Return what the rejected nodes leave of the target's distributions, float32 [sequences, vocab_size].

    Each node takes away the probabilities that it was drawn with; the rest is normalized.
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
    """Return weights [n, vocab_size] less what each row's node was drawn with, at least 0."""
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
    """Return the noise's keys, int64 [n], for a position of each sequence's round."""
    seeds = [sequence.params.seed for sequence in sequences]
    starts = [sequence.position for sequence in sequences]
    columns = torch.tensor([seeds, starts, list(positions)], dtype=torch.int64, device=device)
    return round_keys(columns[0], columns[1], columns[2], purpose)


def _odds(rows: DraftedRows, target: Tensor, failed: Tensor) -> tuple[list[DraftProbabilities], list[int]]:
    """Return the sequences' odds and the rows that failed, in one copy from the device."""
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
    downloaded = torch.cat([drawn.flatten(), failed.double()]).tolist()
    nodes = iter([downloaded[first : first + 3] for first in range(0, drawn.numel(), 3)])
    odds = [
        DraftProbabilities(draft, target[span], list(islice(nodes, draft.num_nodes)))
        for draft, span in zip(drafts, rows.spans, strict=True)
    ]
    return odds, [row for row, fails in enumerate(downloaded[drawn.numel() :]) if fails]


def _drawn_with(drafts: list[Draft], tokens: Tensor) -> Tensor:
    """Return the probability that each node was drawn with, float32 [nodes of all drafts]."""
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


def _after_probes(odds: DraftProbabilities) -> list[int]:
    if not odds.draft.probes:
        return []
    return odds.target[1 + odds.draft.num_nodes :].argmax(dim=1).tolist()
