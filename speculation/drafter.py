"""The interface of a drafting method, and the parts of steps that drafters observe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import Group
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateLayout
from engine.step.draft import Draft, Outcome
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState

_FEW_ROWS = 256


@dataclass(slots=True, eq=False)
class HiddenRows:
    """Some rows of a step's hidden states `of_step` [rows, captured layers * hidden_size].

    They are in the model's dtype, and are cut out only when needed, which is rare.
    """

    of_step: Tensor
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self) -> Tensor:
        """Return the rows [len, captured layers * hidden_size]; a view if they are adjacent."""
        if isinstance(self.rows, range):
            return self.of_step[self.rows.start : self.rows.stop]
        return torch.stack([self.of_step[row] for row in self.rows])  # indexing by a list waits for the GPU

    def newest(self) -> HiddenRows:
        """Return the last row alone, as a copy if the step is too large to be kept for it."""
        last = self.rows[-1]
        if len(self.of_step) <= _FEW_ROWS:
            return HiddenRows(self.of_step, range(last, last + 1))
        return HiddenRows(self.of_step[last : last + 1].clone(), range(1))


@dataclass(slots=True, eq=False)
class ComputedRows:
    """One sequence's part of a step, all of it committed. `sequence` already has its new tokens.

    The KV of the tokens at places `start` to `start + num_tokens - 1` was computed, and `hidden` are their
    hidden states; None if the method captures none. `draft` is the draft that the step verified, `accepted`
    its nodes among these tokens, and `probed` the model's likeliest token after each of its probes.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    hidden: HiddenRows | None = None
    draft: Draft | None = None
    accepted: Sequence[int] = ()
    probed: Sequence[int] = ()

    @classmethod
    def of(
        cls, sequence: SequenceState, outcome: Outcome, of_step: Tensor | None, first_row: int
    ) -> ComputedRows:
        """Return a sequence's part of a step; its hidden states in `of_step` begin at `first_row`."""
        verdict, draft = outcome.verdict, outcome.draft
        accepted = verdict.accepted[: outcome.num_accepted] if verdict is not None else []
        hidden = None
        if of_step is not None:
            rows: Sequence[int] = range(first_row, first_row + outcome.num_tokens)
            if draft is not None and draft.parents is not None:
                own = first_row + outcome.num_tokens - outcome.num_accepted
                rows = [*range(first_row, own), *(own + node for node in accepted)]
            hidden = HiddenRows(of_step, rows)
        return cls(
            sequence=sequence,
            start=outcome.start,
            num_tokens=outcome.num_tokens,
            hidden=hidden,
            draft=draft,
            accepted=accepted,
            probed=verdict.probed if verdict is not None else (),
        )


class Drafter(ABC):
    """A drafting method: it proposes tokens for all sequences of a batch at once, in one thread.

    `kv_group`, `state_layout` and `hidden_layers` are as in `engine.step.speculation_interface.Speculator`. A
    drafter keeps its knowledge of a request by id until `forget`. A request may come back at an earlier place
    (preempted) or move to another worker, so a drafter must be able to rebuild what it lacks from the
    sequence's tokens, or work without it.
    """

    kv_group: Group | None = None
    state_layout: StateLayout | None = None
    hidden_layers: tuple[int, ...] = ()
    is_able = True
    """Whether it can draft on this host. If not, its requests are counted, and go on without drafts."""
    carried_features = 0
    """The number of hidden states in `feature` in addition to the target's."""

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:  # noqa: B027
        """Prepare for the pool; `pool.segment("draft")` is the method's own if it has a `kv_group`."""

    def warm_up(self) -> None:  # noqa: B027
        """Compile kernels before the first request."""

    @abstractmethod
    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Begin a sequence that has got its blocks; anything known of its KV and features no longer holds.

        The leading `num_drafted` places have draft KV. `feature` is the result of `feature` in the sequence's
        previous drafter, if it belongs to the last computed token.
        """

    def num_drafted(self, request_id: str) -> int:
        """Return the number of leading places of the request's blocks with draft KV of committed tokens."""
        return 0

    def feature(self, request_id: str) -> Tensor | None:
        """Return the hidden states of the request's last computed token, [(captured layers +
        `carried_features`) * hidden_size], for methods that draft from them.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        """Return a draft for each sequence, of at most `counts[i]` tokens (probes included), or None.

        The counts descend. All sequences are decoding: every token but the last has its KV. Their blocks have
        room for the KV of `counts[i]` more tokens, at the places after the last token.
        """

    def observe(self, computed: Sequence[ComputedRows]) -> None:  # noqa: B027
        """Learn from an ended step: prefill chunks, and verified drafts."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Forget an ended request. Unknown ids are ignored."""


MOST_STEPS, _MOST_ROWS = 80, 1024
"""The most steps that are kept, and the most rows of their hidden states."""


class UnreadSteps:
    """The latest steps that no drafter observed, kept for requests that may want to draft after all. Keeping
    a step costs next to nothing; observing it costs time.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[ScheduledStep, Tensor]] = deque()
        self._num_rows = 0

    def keep(self, step: ScheduledStep, hidden: Tensor) -> None:
        """Keep a step with its `hidden` states [rows, captured layers * hidden_size]."""
        self._steps.append((step, hidden))
        self._num_rows += len(hidden)
        while len(self._steps) > MOST_STEPS or self._num_rows > _MOST_ROWS:
            _, dropped = self._steps.popleft()
            self._num_rows -= len(dropped)

    def of(self, sequence: SequenceState) -> list[ComputedRows]:
        """Return the steps' parts that concern the sequence, the oldest first."""
        found = []
        for step, hidden in self._steps:
            row = 0
            for other, outcome in zip(step.sequences, step.outcomes, strict=True):
                if other is sequence:
                    found.append(ComputedRows.of(sequence, outcome, hidden, row))
                row += outcome.num_rows
        return found

    def clear(self) -> None:
        self._steps.clear()
        self._num_rows = 0
