"""Verification by the rule that the deployment chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification import block, chains, coupled, on_device, rejection, standard
from speculation.verification.rows import num_rows

Judge = Callable[[Sequence[SequenceState], Tensor, Sampler], list[Verdict]]

_BY_CHANCE: dict[Verification, Judge] = {
    "standard": partial(rejection.verify, rule=standard.decide),
    "block": partial(rejection.verify, rule=block.decide),
}
_ON_DEVICE: dict[Verification, Judge] = {
    "standard": on_device.verify,
    "block": partial(on_device.verify, as_blocks=True),
}
_STANDARD_CHAINS = partial(chains.verify, is_coupled=False)


def prepare(verification: Verification, sampler: Sampler, dtype: torch.dtype) -> None:
    """Build what is compiled, so that no request waits for it. `dtype` is that of logits."""
    _is_native(verification, sampler)
    if sampler.has_kernels and verification in _ON_DEVICE:
        on_device.warm_up(sampler, dtype, as_blocks=verification == "block")


def verify(
    verification: Verification, sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler
) -> list[Verdict]:
    """As `coupled.verify`. Whatever the rule, sequences that are greedy or have no draft get the very tokens
    that they would get alone.
    """
    is_native = _is_native(verification, sampler)
    if verification == "coupled" or not any(map(_is_left_to_chance, sequences)):
        if is_native and all(map(chains.can_verify, sequences)):
            return chains.verify(sequences, logits, sampler, is_coupled=True)
        return coupled.verify(sequences, logits, sampler)
    parts: dict[Judge, _Part] = {}
    row = 0
    for sequence in sequences:
        first, row = row, row + num_rows(sequence)
        part = parts.setdefault(_judge_of(sequence, verification, sampler, is_native), _Part())
        part.sequences.append(sequence)
        part.rows.extend(range(first, row))
    if len(parts) == 1:
        (judge,) = parts
        return judge(sequences, logits, sampler)
    verdicts: dict[SequenceState, Verdict] = {}
    for judge, part in parts.items():
        found = judge(part.sequences, logits[part.rows], sampler)
        verdicts |= zip(part.sequences, found, strict=True)
    return [verdicts[sequence] for sequence in sequences]


@dataclass(slots=True, eq=False)
class _Part:
    """Some of a batch's sequences, and their rows."""

    sequences: list[SequenceState] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def _is_native(verification: Verification, sampler: Sampler) -> bool:
    """Whether it verifies chains by a compiled call."""
    return verification != "block" and sampler.is_native and chains.compiled() is not None


def _judge_of(
    sequence: SequenceState, verification: Verification, sampler: Sampler, is_native: bool
) -> Judge:
    """It depends on the sequence alone, so that this gets the same tokens in any batch."""
    if sampler.has_kernels and on_device.can_verify(sequence):
        return _ON_DEVICE[verification]
    if is_native and chains.can_verify(sequence):
        return _STANDARD_CHAINS
    return _BY_CHANCE[verification] if _is_left_to_chance(sequence) else coupled.verify


def _is_left_to_chance(sequence: SequenceState) -> bool:
    draft = sequence.draft
    return draft is not None and draft.num_nodes > 0 and not sequence.params.is_greedy
