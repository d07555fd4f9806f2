"""The interface of a speculator: drafts before a step, verdicts after its forward.

The engine makes room for drafts, runs them with the other rows, and keeps the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import Group
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateLayout
from engine.sampler import Sampler
from engine.step.draft import Verdict
from engine.step.profiling import ProfilingRun
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from protocol.handoff import REBUILD, DraftState
from protocol.speculation import SpeculationState

MakeRoom = Callable[[ScheduledStep, SequenceState, int], int]
"""A function that reserves blocks and budget for up to n draft tokens of a sequence of the step, called at
most once for each sequence; it returns how many got room."""


class Speculator:
    """The speculator of an engine, for the engine's thread; any thread may call `counters` and `report`.

    In each step the engine calls `prepare`, then `verify` if there are drafts, then `finish`. For a step that
    was launched ahead, which `may_go_ahead` allows, it calls `went_ahead` instead of `prepare`. `kv_group` is
    the draft model's KV, named `DRAFT`; `state_layout` is the state of the draft model's recurrent layers.
    Each is None if the draft has none. `hidden_layers` are the hidden states that the drafter reads, numbered
    as in Transformers' `hidden_states`: 0 the embeddings, i the output of layer i, the last one after the
    final norm. Recurrent layers have room for `most_drafted` draft tokens; longer drafts are cut to it.

    This one drafts nothing.
    """

    kv_group: Group | None = None
    state_layout: StateLayout | None = None
    hidden_layers: tuple[int, ...] = ()
    most_drafted: int = 0
    off_because: str = ""
    """The reason why requests that do not ask for drafts get none on this worker, known after `warm_up`."""

    def attach(self, loaded: LoadedModel, pool: KVPool, sampler: Sampler) -> None:
        """Take the model, the pool and the sampler. Called once, before any other method."""

    def warm_up(self, profiling: ProfilingRun, *, is_exact: bool) -> None:
        """Compile and measure before the first request. `is_exact`: no draft can change a token here."""

    def begin(self, sequence: SequenceState, state: DraftState = REBUILD) -> None:
        """Take up a handed-over sequence that starts decoding; `state` came with it."""

    def state(self, request_id: str) -> DraftState:
        """Return the draft state that a hand-off carries in addition to the blocks of a finished prefill."""
        return REBUILD

    def prepare(self, step: ScheduledStep, num_active: int, make_room: MakeRoom) -> bool:
        """Start the step's admitted sequences, and set the `draft` of decoding ones. Return whether `finish`
        needs the step's hidden states.

        `num_active` sequences decode, or will soon. The length of a draft must not depend on uncommitted
        tokens.
        """
        return False

    def may_go_ahead(self, step: ScheduledStep, num_active: int) -> bool:
        """Return whether this decode step needs no draft and no hidden states, whatever tokens the running
        step before it brings. `num_active` is the same as in `prepare`, as far as it is known.
        """
        return True

    def went_ahead(self, step: ScheduledStep, num_active: int) -> None:
        """Begin a step that was launched ahead, without sequences that have ended since the launch."""

    def verify(self, sequences: Sequence[SequenceState], logits: Tensor) -> list[Verdict]:
        """Verify drafts. `logits` has each sequence's rows in order: last token, then each draft token."""
        raise AssertionError("nothing is drafted")

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        """Finish a step whose tokens are committed; `step.outcomes` has the result for each sequence.

        `hidden` [total rows, len(hidden_layers) * hidden_size] has the rows of the step's sequences in order,
        draft tokens included; None if `prepare` did not ask for it.
        """

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence whose request has ended. Ignore an unknown one."""

    def replan(self, sequence: SequenceState) -> None:
        """Adopt the sequence's new `draft_plan`, between two steps."""

    def counters(self) -> dict[str, float]:
        """Return totals since the start, by the names of the worker's counters."""
        return {}

    def report(self) -> SpeculationState:
        return SpeculationState()
