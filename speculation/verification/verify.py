"""Verification by the rule that the deployment chose."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from torch import Tensor

from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.speculator import Verdict
from protocol.speculation import Verification
from speculation.verification import block, coupled, rejection, standard
from speculation.verification.rows import num_rows

_RULES = {"standard": standard.decide, "block": block.decide}


def verify(
    verification: Verification, sequences: Many[Sequence], logits: Tensor, sampler: Sampler
) -> list[Verdict]:
    """As `coupled.verify`. Whatever the rule, sequences that are greedy or have no draft get the very tokens
    that they would get alone.
    """
    if verification == "coupled" or not any(map(_is_left_to_chance, sequences)):
        return coupled.verify(sequences, logits, sampler)
    rule = _RULES[verification]
    if all(map(_is_left_to_chance, sequences)):
        return rejection.verify(sequences, logits, sampler, rule)
    by_chance, others = _Part(), _Part()
    row = 0
    for sequence in sequences:
        first, row = row, row + num_rows(sequence)
        part = by_chance if _is_left_to_chance(sequence) else others
        part.sequences.append(sequence)
        part.rows.extend(range(first, row))
    found = rejection.verify(by_chance.sequences, logits[by_chance.rows], sampler, rule)
    verdicts = dict(zip(by_chance.sequences, found, strict=True))
    found = coupled.verify(others.sequences, logits[others.rows], sampler)
    verdicts |= zip(others.sequences, found, strict=True)
    return [verdicts[sequence] for sequence in sequences]


@dataclass(slots=True, eq=False)
class _Part:
    """Some of a batch's sequences, and their rows."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def _is_left_to_chance(sequence: Sequence) -> bool:
    draft = sequence.draft
    return draft is not None and draft.num_nodes > 0 and not sequence.params.is_greedy
