"""Drafting chains whose tokens stay on the device: each step takes those of the one before from there, and so
does what verifies them, so that the host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import ForwardOutput, Runner, Step
from engine.download import Downloader
from engine.sampler.rows import needs_history
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.sequence import SequenceState
from speculation.drawing import Drawing, Drawn

RowOf = Callable[[SequenceState, int, int], SequenceRows]
"""The row of a token behind so many drafted ones of a sequence."""


class ChainsAhead:
    def __init__(self, runner: Runner, drawing: Drawing, device: torch.device, row_of: RowOf) -> None:
        self._runner = runner
        self._drawing = drawing
        self._download = Downloader(device)
        self._row_of = row_of

    @staticmethod
    def can_draft(sequences: Sequence[SequenceState]) -> bool:
        """Whether tokens can be drawn before the host knows those before them."""
        return not any(needs_history(sequence.params) for sequence in sequences)

    def draft(
        self,
        sequences: Sequence[SequenceState],
        counts: Sequence[int],
        first: ForwardOutput,
        whole: Callable[[Tensor], Tensor],
    ) -> list[Draft]:
        """`first` is of each sequence's last token, and `whole` brings logits to the target's vocabulary. The
        counts fall.
        """
        drawn: list[Drawn] = []
        logits, hidden = first
        for place in range(counts[0]):
            growing = [each for each, count in zip(sequences, counts, strict=True) if count > place]
            if place:
                batch = [self._row_of(each, ~row, place - 1) for row, each in enumerate(growing)]
                before = None if hidden is None else hidden[: len(growing)]
                newest = LateTokens(drawn[-1].token_ids, self._download)
                step = Step(batch, range(len(growing)), hidden=before)
                logits, hidden = self._runner.run(step, newest.fill)
            drawn.append(self._drawing.draw(growing, whole(logits), place))
        late = LateTokens(torch.cat([each.token_ids for each in drawn]).clamp_min(0), self._download)
        firsts = [0, *accumulate(len(each.token_ids) for each in drawn)]
        drafts = []
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            taken = [each.distributions[row] for each in drawn[:count] if each.distributions is not None]
            distributions = torch.stack(taken) if taken and not sequence.params.is_greedy else None
            names = [~(first + row) for first in firsts[:count]]
            drafts.append(Draft(names, distributions=distributions, late=late))
        return drafts


def chains_ahead(runner: Runner, drawing: Drawing, device: torch.device, row_of: RowOf) -> ChainsAhead | None:
    """Where there is something to wait for, and the runner can."""
    if device.type == "cpu" or not runner.can_fill:
        return None
    return ChainsAhead(runner, drawing, device, row_of)
