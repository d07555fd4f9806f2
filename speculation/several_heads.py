"""Runs the MTP heads of a checkpoint as one draft head: each drafts the token of its number.

A head's row at a place has the place's token and a hidden state. The first head reads the target's of the
place before. Each further head reads the output that the head before it has in the place before, or again
what that head read there. So a head's KV at a place follows from the tokens up to that place: it stays right
for all later drafts, moves with the target's KV and is found with prefixes, as the KV of a single head is.

Where more tokens are drafted than there are heads, the last head reads its own output for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import Fill, ForwardOutput, Runner, Step


class SeveralHeads(Runner):
    """`heads` return the hidden states of all rows. With `reads_target` all heads read the target's."""

    chains = None
    any_threads = deterministic = False
    choice = "several heads"

    def __init__(self, heads: Sequence[Runner], *, reads_target: bool) -> None:
        self._heads, self._reads_target = heads, reads_target
        self.products, self.can_fill = heads[0].products, heads[0].can_fill
        self._depth = 0
        """The number of drafted tokens that the newest rows end."""
        self.carried: Tensor | None = None
        """The further heads' hidden states in the place after the newest committed rows, [sequences, further
        heads, hidden_size]. Before a call with committed rows: in the first place of these.
        """

    def warm_up(self) -> float:
        return sum(head.warm_up() for head in self._heads)

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Run committed rows, with the target's hidden states, or drafted ones, all of one depth, with the
        `hidden` that this returned for the rows before.
        """
        if step.batch[0].tree_start is None:
            self._depth = 0
            return self._run_committed(step)
        self._depth += 1
        return self._run_drafted(step, fill)

    def _run_committed(self, step: Step) -> ForwardOutput:
        """Run the rows by all heads, so that each has the KV of all places. The first one drafts."""
        assert step.hidden is not None and self.carried is not None
        read = [*step.hidden.split([len(rows.token_ids) for rows in step.batch])]
        logits, made = self._run_head(0, step.batch, step.logit_rows, read)
        after = []
        for number, before in enumerate(self.carried.unbind(1), start=1):
            given = read if self._reads_target else made
            ends = zip(before, given, strict=True)
            after.append(torch.stack([states[-1] if len(states) else old for old, states in ends]))
            read = [
                _shifted(rows, number, *states)
                for rows, *states in zip(step.batch, before.split(1), given, strict=True)
            ]
            _, made = self._run_head(number, step.batch, (), read)
        self.carried = torch.stack(after, dim=1)
        return ForwardOutput(logits, self.carried.flatten(1))

    def _run_head(
        self, number: int, batch: Sequence[SequenceRows], logit_rows: Sequence[int], read: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the last rows of each sequence, of which there are hidden states. Return logits and outputs."""
        later = [
            replace(
                rows,
                token_ids=rows.token_ids[-len(states) :],
                start=rows.start + len(rows.token_ids) - len(states),
                first_key=rows.first_key + number,
            )
            for rows, states in zip(batch, read, strict=True)
            if len(states)
        ]
        hidden = torch.cat([*read])
        if not later:
            return hidden, read
        output = self._heads[number].run(Step(later, logit_rows, hidden=hidden))
        assert output.hidden is not None
        return output.logits, output.hidden.split([*map(len, read)])

    def _run_drafted(self, step: Step, fill: Fill | None) -> ForwardOutput:
        """Run the rows by the head that drafts after them, and by the further ones, which see them later."""
        assert step.hidden is not None
        last = len(self._heads) - 1
        first = min(self._depth, last)
        read = step.hidden.unflatten(1, (last, -1)).unbind(1)
        after = [*read]
        logits = step.hidden
        for number in range(first, last + 1):
            batch = [
                replace(rows, first_key=min(rows.first_key + number, (rows.tree_start or 0) + 1))
                for rows in step.batch
            ]
            wanted = step.logit_rows if number == first else ()
            output = self._heads[number].run(Step(batch, wanted, hidden=read[number - 1]), fill)
            assert output.hidden is not None
            if number == first:
                logits = output.logits
            if number < last:
                after[number] = read[number - 1] if self._reads_target else output.hidden
            elif first == last:
                after[-1] = output.hidden
        return ForwardOutput(logits, torch.cat(after, dim=1))


def _shifted(rows: SequenceRows, number: int, before: Tensor, given: Tensor) -> Tensor:
    """Return the hidden states of a further head's rows. `given` are those after the rows of the head before
    it, and `before` the one before all of them. The head's first place lies `number` after the first head's.
    """
    return given[:-1] if rows.start < rows.first_key + number else torch.cat([before, given[:-1]])
