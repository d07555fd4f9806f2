"""Verification by the deployment's rule, with an implementation for each device.

`native` (compiled calls for chains on a CPU) and `on_device` (Triton kernels) say by `can_verify` which
sequences they take. `verify_coupled` and `rejection` take all, by the sampler and torch's operators.

By the coupled rule, the target's token at each drafted place is chosen as without speculation, with the noise
of its own position. So the output is the same whatever was drafted, and a draft is accepted while it equals
the output. (Yang et al. 2023, "Inference with Reference", for greedy decoding; with noise shared by position
it is exact for sampling, too.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft, Verdict
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.verification import native, on_device, rejection
from speculation.verification.rows import Decision, DraftedRows, num_rows


def verify_coupled(
    sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler, rule: Verification = "coupled"
) -> list[Verdict]:
    """Return a verdict for each sequence. `logits` [rows, vocab_size] are for each sequence the row after its
    last token, then one after each draft token. `rule` may be another one if chance has no part.
    """
    rows = DraftedRows(sequences, takes_late=sampler.has_kernels)
    tokens, failed_rows = _own_tokens(rows, logits, sampler)
    decisions = [
        _decide(sequence.draft, tokens[span]) for sequence, span in zip(sequences, rows.spans, strict=True)
    ]
    return rows.conclude(decisions, logits, failed_rows, sampler)


def _own_tokens(rows: DraftedRows, logits: Tensor, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Return the target's token after each row, and the rows that failed. Also fetch late draft tokens."""
    if rows.late is None:
        chosen, failed_rows = sampler.choose(logits, rows.sampling)
        return chosen.tolist(), failed_rows
    tokens = sampler.tokens(logits, rows.sampling, rows.position_offsets(sampler.upload))
    token_ids = rows.bring(tokens, sampler.download)
    return [max(token, 0) for token in token_ids], [row for row, token in enumerate(token_ids) if token < 0]


def _decide(draft: Draft | None, tokens: list[int]) -> Decision:
    """Decide on a draft by the target's own token after each row."""
    if draft is None:
        return Decision([], tokens[0])
    accepted = agreeing_path(draft, tokens)
    last_row = accepted[-1] + 1 if accepted else 0
    return Decision(accepted, tokens[last_row], tokens[1 + draft.num_nodes :])


def agreeing_path(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Return the path of nodes whose tokens are the target's; `tokens[i]` is the target's after row i."""
    path: list[int] = []
    last = -1
    for node in range(draft.num_nodes):  # a node's children come after it
        if draft.parent(node) == last and draft.token_ids[node] == tokens[last + 1]:
            path.append(node)
            last = node
    return path


Verify = Callable[[Sequence[SequenceState], Tensor, Sampler, Verification], list[Verdict]]


def prepare(rule: Verification, sampler: Sampler, dtype: torch.dtype) -> None:
    """Build what must be compiled, so that no request waits for it. `dtype` is the logits'."""
    _is_native(rule, sampler)
    if sampler.has_kernels and rule != "coupled":
        on_device.warm_up(sampler, dtype, rule)


def verify(
    rule: Verification, sequences: Sequence[SequenceState], logits: Tensor, sampler: Sampler
) -> list[Verdict]:
    """Verify like `verify_coupled`. Under any rule, sequences that are greedy or have no draft get exactly
    the tokens that they would get alone.
    """
    is_native = _is_native(rule, sampler)
    if rule == "coupled" or not any(map(_is_left_to_chance, sequences)):
        if is_native and all(map(native.can_verify, sequences)):
            return native.verify(sequences, logits, sampler, "coupled")
        return verify_coupled(sequences, logits, sampler, rule)
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
    return rejection.verify if _is_left_to_chance(sequence) else verify_coupled


def _is_left_to_chance(sequence: SequenceState) -> bool:
    draft = sequence.draft
    return draft is not None and draft.num_nodes > 0 and not sequence.params.is_greedy
