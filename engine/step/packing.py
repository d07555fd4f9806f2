"""Packing of a step's sequences into the rows of one forward, and the choice of rows that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.step.draft import LateTokens, late_among
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState


@dataclass(eq=False)
class PackedStep:
    """A step's rows as the runner takes them, one sequence after the other.

    `logit_rows` are the packed rows that need logits: first the `sampled` sequences' last tokens and draft
    tokens, then all rows of the chunks of `prompts` (sequence, number of rows) that want log-probabilities.
    A row whose token the host does not know yet has a placeholder of one of the `late` tokens.
    """

    batch: list[SequenceRows] = field(default_factory=list)
    sampled: list[SequenceState] = field(default_factory=list)
    prompts: list[tuple[SequenceState, int]] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    num_sampled_rows: int = 0
    num_tokens: int = 0
    late: LateTokens | None = None

    def step(self, *, wants_hidden: bool) -> Step:
        return Step(self.batch, self.logit_rows, wants_hidden)


def pack(step: ScheduledStep, *, takes_late: bool = False) -> PackedStep:
    """Pack a step. Unless the runner `takes_late`, wait here for tokens that the host does not know."""
    packed = PackedStep()
    if takes_late:
        packed.late = late_among(sequence.draft for sequence in step.sequences)
    prompt_rows: list[int] = []
    row = 0
    for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
        start = sequence.num_computed
        token_ids, masks = sequence.token_ids[start : start + count], None
        if count == sequence.num_uncomputed:
            packed.sampled.append(sequence)
            if sequence.draft is not None:
                token_ids = token_ids + sequence.draft.ids_beside(packed.late)
                masks = sequence.draft.masks()
            packed.logit_rows.extend(range(row + count - 1, row + len(token_ids)))
        if sequence.wants_prompt_logprobs:
            packed.prompts.append((sequence, count))
            prompt_rows.extend(range(row, row + count))
        packed.batch.append(
            SequenceRows(
                token_ids,
                start,
                sequence.held.blocks,
                masks,
                state_slot=sequence.state_slot,
                certain=start + count,
                adapter=sequence.adapter,
            )
        )
        row += len(token_ids)
    packed.num_sampled_rows = len(packed.logit_rows)
    packed.logit_rows += prompt_rows
    packed.num_tokens = row
    return packed


def pack_ahead(sequences: Sequence[SequenceState], before: PackedStep, chosen: LateTokens) -> PackedStep:
    """Pack a row for each sequence, with the token that the step `before` chooses for it.

    No token counts as certain, since its sequence may end with it. So a recurrent layer's state reaches a
    grid point one step later, and at each commit it is where it would be without steps ahead.
    """
    places = {sequence: place for place, sequence in enumerate(before.sampled)}
    batch = [
        SequenceRows(
            [~places[each]],
            each.position,
            each.held.blocks,
            state_slot=each.state_slot,
            certain=each.position,
            adapter=each.adapter,
        )
        for each in sequences
    ]
    count = len(batch)
    return PackedStep(batch, [*sequences], [], [*range(count)], count, count, chosen)
