"""How stochastic drafters draw: with the noise of the target's own tokens, or with noise of their own.

Coupled verification compares a draft with the target's token at the same position, so that sharing its noise
makes the two agree wherever the models do. Rejection sampling needs drafts that no other noise knows of, and
the distribution that each was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampler import Sampler, SamplingRow
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.speculation import Verification


@dataclass(slots=True, eq=False)
class Chain:
    """A sequence's draft while it grows.

    `distributions`: float32 [vocab_size] for each token, if it was drawn by chance alone.
    """

    sequence: SequenceState
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def draft(self) -> Draft:
        distributions = torch.stack(self.distributions) if self.distributions else None
        return Draft(self.token_ids, distributions=distributions)


class Drawn(NamedTuple):
    """Where the logits lie: int64 [n], and float32 [n, vocab_size] if some were drawn by chance alone. What
    could not be chosen may be negative.
    """

    token_ids: Tensor
    distributions: Tensor | None


class Drawing:
    """For one drafter; `sampler` is its own, so that it must `forget` requests there."""

    def __init__(self, sampler: Sampler, verification: Verification) -> None:
        self._sampler = sampler
        self._shares_noise = verification == "coupled"

    def extend(self, chains: Sequence[Chain], logits: Tensor) -> None:
        """Add a token to each chain, by the draft's `logits` [chains, vocab_size] after what it has."""
        rows = [chain.sequence.sampling_row(chain.token_ids) for chain in chains]
        tokens, probabilities = self._choose([chain.sequence for chain in chains], rows, logits)
        if probabilities is not None:
            for chain, distribution in zip(chains, probabilities, strict=True):
                if not chain.sequence.params.is_greedy:
                    chain.distributions.append(distribution)
        for chain, token in zip(chains, tokens.tolist(), strict=True):
            chain.token_ids.append(max(token, 0))

    def draw(self, sequences: Sequence[SequenceState], logits: Tensor, place: int) -> Drawn:
        """For each sequence a token behind `place` drafted ones, which its choice does not look at."""
        rows = [sequence.sampling_row([0] * place) for sequence in sequences]
        return self._choose(sequences, rows, logits)

    def draw_at_once(self, sequences: Sequence[SequenceState], logits: Tensor) -> Drawn:
        """Several tokens for each sequence, one after the other, by `logits` [sequences, count, vocab_size]
        that do not depend on the tokens before.
        """
        owners = [sequence for sequence in sequences for _ in range(logits.shape[1])]
        rows = [owner.sampling_row() for owner in owners]
        for number, row in enumerate(rows):
            row.position += number % logits.shape[1]
        return self._choose(owners, rows, logits.flatten(0, 1))

    def _choose(self, sequences: Sequence[SequenceState], rows: list[SamplingRow], logits: Tensor) -> Drawn:
        if self._shares_noise or all(row.params.is_greedy for row in rows):
            return Drawn(self._sampler.tokens(logits, rows), None)
        starts = [sequence.position for sequence in sequences]
        return Drawn(*self._sampler.draw_drafts(logits, rows, starts))
