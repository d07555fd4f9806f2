"""Verification by the deployment's rule, with an implementation for each device.

Each has `verify(sequences, logits, sampler, rule)`. `native` (compiled calls for chains on a CPU) and
`on_device` (Triton kernels) say by `can_verify` which sequences they take. `coupled` and `rejection` take
all, by the sampler and torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification import coupled, native, on_device, rejection
from speculation.verification.rows import num_rows

Verify = Callable[[Sequence[SequenceState], Tensor, Sampler, Verification], list[Verdict]]


def prepare(rule: Verification, sampler: Sampler, dtype: torch.dtype) -> None:
    """Build what must be compiled, so that no request waits for it. `dtype` is the logits'."""
    _is_native(rule, sampler)
    if sampler.has_kernels and rule != "coupled":
        on_device.warm_up(sampler, dtype, rule)


def verify(
    rule: Verification, sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler
) -> list[Verdict]:
    """Verify like `coupled.verify`. Under any rule, sequences that are greedy or have no draft get exactly
    the tokens that they would get alone.
    """
    is_native = _is_native(rule, sampler)
    if rule == "coupled" or not any(map(_is_left_to_chance, sequences)):
        if is_native and all(map(native.can_verify, sequences)):
            return native.verify(sequences, logits, sampler, "coupled")
        return coupled.verify(sequences, logits, sampler, rule)
    parts: dict[Verify, list[int]] = {}
    rows: list[range] = []
    for number, sequence in enumerate(sequences):
        first = rows[-1].stop if rows else 0
        rows.append(range(first, first + num_rows(sequence)))
        parts.setdefault(_verify_for(sequence, sampler, is_native), []).append(number)
    if len(parts) == 1:
        (only,) = parts
        return only(sequences, logits, sampler, rule)
    verdicts: dict[int, Verdict] = {}
    for judge, numbers in parts.items():
        own = logits[[row for number in numbers for row in rows[number]]]
        found = judge([sequences[number] for number in numbers], own, sampler, rule)
        verdicts |= zip(numbers, found, strict=True)
    return [verdicts[number] for number in range(len(sequences))]


def _is_native(rule: Verification, sampler: Sampler) -> bool:
    """Return whether compiled calls verify chains."""
    return rule != "block" and sampler.is_native and native.compiled() is not None


def _verify_for(sequence: SequenceState, sampler: Sampler, is_native: bool) -> Verify:
    """Choose by the sequence alone, so that it gets the same tokens in any batch."""
    if sampler.has_kernels and on_device.can_verify(sequence):
        return on_device.verify
    if is_native and native.can_verify(sequence):
        return native.verify
    return rejection.verify if _is_left_to_chance(sequence) else coupled.verify


def _is_left_to_chance(sequence: SequenceState) -> bool:
    draft = sequence.draft
    return draft is not None and draft.num_nodes > 0 and not sequence.params.is_greedy
