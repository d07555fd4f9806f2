"""The interface of a speculator: drafts before a step, verdicts after its forward.

The engine makes room for drafts, runs them with the other rows, and keeps what was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import Group
from engine.kv.pool import KVPool
from engine.kv.state_layout import StateLayout
from engine.sampler import Sampler
from engine.step.draft import Verdict
from engine.step.profiling import ProfilingRun
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from protocol.handoff import DraftState
from protocol.speculation import SpeculationState

MakeRoom = Callable[[ScheduledStep, SequenceState, int], int]
"""Reserves blocks and budget for up to so many drafted tokens of one of the step's sequences, once for each;
returns how many got room."""


class Speculator(Protocol):
    """One per engine, for the engine's thread; `counters` and `report` may be called from any thread.

    In each step the engine calls `prepare`, `verify` if there are drafts, and `finish`. A step that was
    launched ahead, which it allows by `may_go_ahead`, has `went_ahead` in the place of `prepare`. `kv_group`
    is the draft's KV, named `DRAFT`, None if it has none, and `state_layout` what its recurrent layers keep
    of a sequence, None if it has none. `hidden_layers` are the hidden states that it reads, numbered as in
    Transformers' `hidden_states`: 0 the embeddings, i the output of layer i, the last one after the final
    norm. `most_drafted` is the number of tokens for which recurrent layers have room; longer drafts get room
    for fewer.
    """

    kv_group: Group | None
    state_layout: StateLayout | None
    hidden_layers: tuple[int, ...]
    most_drafted: int

    def attach(self, loaded: LoadedModel, pool: KVPool, sampler: Sampler) -> None:
        """Called once, first: the pool exists now."""

    def warm_up(self, profiling: ProfilingRun) -> None:
        """Compile and measure before the first request."""

    def begin(self, sequence: SequenceState, state: DraftState) -> None:
        """A handed-over sequence starts decoding; `state` came with it."""

    def state(self, request_id: str) -> DraftState:
        """Return what a hand-off carries in addition to the blocks of a finished prefill."""

    def prepare(self, step: ScheduledStep, num_active: int, make_room: MakeRoom) -> bool:
        """Start the step's admitted sequences, and set the `draft` of decoding ones. Returns whether `finish`
        needs the step's hidden states.

        `num_active` sequences decode, or will soon. How much is drafted must not depend on
        uncommitted tokens.
        """

    def may_go_ahead(self, step: ScheduledStep, num_active: int) -> bool:
        """Whether this decode step needs no draft and no hidden states, whatever tokens the step before it
        brings: that one runs. `num_active` as in `prepare`, as far as is known.
        """

    def went_ahead(self, step: ScheduledStep, num_active: int) -> None:
        """Its turn has come. Sequences that have ended since the launch are no longer among its own."""

    def verify(self, sequences: Sequence[SequenceState], logits: Tensor) -> list[Verdict]:
        """`logits` has each sequence's rows in order: after its last token, then after each drafted one."""

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        """The step's tokens are committed; `step.outcomes` has the result for each sequence.

        `hidden` [total rows, len(hidden_layers) * hidden_size]: the rows of the step's sequences in order,
        drafted ones included. None if `prepare` did not ask for them.
        """

    def forget(self, sequence: SequenceState) -> None:
        """The request has ended. Unknown ones are ignored."""

    def replan(self, sequence: SequenceState) -> None:
        """Its `draft_plan` has changed, between two steps."""

    def counters(self) -> dict[str, float]:
        """Totals since the start, by the names of the worker's counters."""

    def report(self) -> SpeculationState:
        """Return what speculation does and costs now."""
