"""How stochastic drafters draw: with the noise of the target's own tokens, or with noise of their own.

Coupled verification compares a draft with the target's token at the same position, so sharing its noise
makes the two agree wherever the models do. Rejection sampling needs drafts that no other noise determines,
and the distribution that each was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.sampler import Sampler, SamplingRow
from engine.step.sequence import SequenceState
from protocol.speculation import Verification


class Drawn(NamedTuple):
    """Tokens on the logits' device, int64 [n], negative where none could be chosen. `distributions`, float32
    [n, vocab_size], unless all are chosen with the target's noise.
    """

    token_ids: Tensor
    distributions: Tensor | None


class Drawing:
    """Draws the tokens of one drafter. `sampler` is the drafter's own, which must `forget` requests there."""

    def __init__(self, sampler: Sampler, verification: Verification) -> None:
        self._sampler = sampler
        self._shares_noise = verification == "coupled"

    def draw(
        self, sequences: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]]
    ) -> Drawn:
        """A token for each sequence, by the draft's `logits` [sequences, vocab_size] after the tokens drafted
        so far. For sequences that do not need their history the number of these is enough.
        """
        rows = [sequence.sampling_row(its) for sequence, its in zip(sequences, drafted, strict=True)]
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
