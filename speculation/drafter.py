"""The contract of a drafting method, and the parts of steps that it observes."""

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
from engine.kv.state_layout import StateLayout
from engine.step.draft import Draft, Outcome
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState

_FEW_ROWS = 256


@dataclass(slots=True, eq=False)
class HiddenRows:
    """Some rows of `of_step` [rows, captured layers * hidden_size], in the model's dtype.

    They are cut out when they are wanted, which many never are.
    """

    of_step: Tensor
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self) -> Tensor:
        """[len, captured layers * hidden_size]; a view where the rows lie one after the other."""
        if isinstance(self.rows, range):
            return self.of_step[self.rows.start : self.rows.stop]
        return torch.stack([self.of_step[row] for row in self.rows])  # a list as an index would have to wait

    def newest(self) -> HiddenRows:
        """The last one alone; a copy where the step was so large that it had better not be kept for it."""
        last = self.rows[-1]
        if len(self.of_step) <= _FEW_ROWS:
            return HiddenRows(self.of_step, range(last, last + 1))
        return HiddenRows(self.of_step[last : last + 1].clone(), range(1))


@dataclass(slots=True, eq=False)
class Computed:
    """The part of a step that concerns one sequence, all committed. `sequence` has its new tokens already.

    The KV of the tokens at places `start` to `start + num_tokens - 1` was computed, and `hidden` are their
    hidden states; None if the method captures none. `draft` is what the step verified, `accepted` the nodes
    of it that are among these tokens, and `probed` the model's likeliest token after each of its probes.
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
    ) -> Computed:
        """`of_step` are the step's hidden states, where the sequence's begin at `first_row`."""
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
    """Proposes tokens for the sequences of a batch, all at once. For one thread.

    `kv_group`, `state_layout` and `hidden_layers` are as in `engine.step.speculation_interface.Speculator`.
    It keeps what it knows of a request by its id until `forget`; a request may come back from far behind
    (preempted) or go to another worker, so that whatever it lacks it must be able to make anew from the
    sequence's tokens, or do without.
    """

    kv_group: Group | None = None
    state_layout: StateLayout | None = None
    hidden_layers: tuple[int, ...] = ()
    further_features = 0
    """The hidden states in `feature` beside the target's."""

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:  # noqa: B027
        """The pool exists; `pool.segment("draft")` is the method's own if it has a `segment`."""

    def warm_up(self) -> None:  # noqa: B027
        """Compile what is to be compiled."""

    @abstractmethod
    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """The sequence has got its blocks; what was known of its KV and features holds no more.

        The leading `num_drafted` places hold draft KV. `feature` is what the drafter that had the sequence
        before has returned as such, if that belongs to the last computed token.
        """

    def num_drafted(self, request_id: str) -> int:
        """Leading places of the request's blocks that hold draft KV of committed tokens."""
        return 0

    def feature(self, request_id: str) -> Tensor | None:
        """Return the hidden states of the request's last computed token, [(captured layers +
        `further_features`) * hidden_size], for methods that draft from them.
        """
        return None

    @abstractmethod
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        """A draft for each sequence, of at most `counts[i]` tokens (probes included); None where there is
        none.

        The counts fall. All sequences are decoding: every token but the last has its KV. Their blocks have
        room for the KV of `counts[i]` tokens more, at the places that follow the last token.
        """

    def observe(self, computed: Sequence[Computed]) -> None:  # noqa: B027
        """A step is over: prompts' chunks, and what was verified."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """The request is over. Unknown ids are ignored."""


MOST_STEPS, _MOST_ROWS = 80, 1024
"""The most steps that are kept, and the most rows of their hidden states."""


class UnreadSteps:
    """The latest steps that drafters did not look at, kept for requests that may want to draft after all.
    Keeping a step costs next to nothing; observing it costs time.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[ScheduledStep, Tensor]] = deque()
        self._num_rows = 0

    def keep(self, step: ScheduledStep, hidden: Tensor) -> None:
        """`hidden` [rows, captured layers * hidden_size] are the step's hidden states."""
        self._steps.append((step, hidden))
        self._num_rows += len(hidden)
        while len(self._steps) > MOST_STEPS or self._num_rows > _MOST_ROWS:
            _, dropped = self._steps.popleft()
            self._num_rows -= len(dropped)

    def of(self, sequence: SequenceState) -> list[Computed]:
        """Return the steps' parts that concern the sequence, the oldest first."""
        found = []
        for step, hidden in self._steps:
            row = 0
            for other, outcome in zip(step.sequences, step.outcomes, strict=True):
                if other is sequence:
                    found.append(Computed.of(sequence, outcome, hidden, row))
                row += outcome.num_rows
        return found

    def clear(self) -> None:
        self._steps.clear()
        self._num_rows = 0
