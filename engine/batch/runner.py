"""The interfaces of what runs a model's packed forwards, and of what recurrent layers compute in them over
tokens; each device has its own implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.batch.recurrent_plan import Tables
from engine.batch.step_inputs import BlockTable, RowArrays, SequenceRows, StepInputs, StepShape
from engine.kv.state_slots import RowSpan


class Step(NamedTuple):
    """The work of one forward: the rows of each sequence, one sequence after the other."""

    batch: Sequence[SequenceRows]
    logit_rows: Sequence[int]
    """Packed rows that need logits."""
    wants_hidden: bool = True
    hidden: Tensor | None = None
    """[rows, hidden_size], for a draft head: the hidden state before each row."""


class ForwardOutput(NamedTuple):
    """Result of a forward. `logits` [logit rows, vocab_size] are valid until the runner's next call. `hidden`
    [all rows, captured layers * hidden_size], or a draft head's, if the runner captures hidden states.
    """

    logits: Tensor
    hidden: Tensor | None


Fill = Callable[[StepInputs], None]
"""A function that writes values which the host does not know yet to a step's inputs, on the device."""


class ChainDrafter(Protocol):
    """A model that drafts whole chains in one call."""

    vocab_size: int
    block_table: BlockTable

    def draft(
        self,
        batch: RowArrays,
        seeds_and_counts: np.ndarray,
        temperatures: np.ndarray,
        vocab_size: int,
        before: Tensor | None = None,
        distributions: Tensor | None = None,
    ) -> np.ndarray:
        """Run the batch's rows, then draft token after token; return int64 [most tokens, sequences].

        `seeds_and_counts`, int64 [2, sequences], has each sequence's seed and number of tokens to draft, in
        descending order of that number; result entries beyond it are undefined. A sequence's blocks have room
        for the KV of all draft tokens except the last. Only the first `vocab_size` logits count.
        `temperatures` are float32. A draft head also takes the hidden states `before` the rows.

        If `distributions`, float32 [sequences, most tokens, width], is given, write the draft's distributions
        over the target's `width` token ids to it, and draw tokens from them with noise of `Purpose.DRAFT`.
        Otherwise choose tokens with the target's own noise.
        """


class Runner(Protocol):
    products: str
    """Description of how the linear layers multiply."""
    any_threads: bool
    """Whether results have the same bits on any number of threads. The number may change between calls."""
    can_fill: bool
    """Whether `run` takes a `fill`."""

    @property
    def chains(self) -> ChainDrafter | None:
        """The drafter of whole chains with this model; None if each draft token takes a `run`."""

    @property
    def deterministic(self) -> bool:
        """Whether a row's result has the same bits in every batch; known after `warm_up`."""

    @property
    def choice(self) -> str:
        """The runner's name, for logs and metrics."""

    def warm_up(self) -> float:
        """Compile or capture the forward, if the runner can. Return the seconds that it took."""

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Write the KV of all rows and compute the logits of `step`; first let `fill` complete the inputs."""


class Operators(Protocol):
    """Operators over packed rows. `layer` is a number among the recurrent layers only."""

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return float32 [rows, channels] for inputs [rows, channels], weight [channels, taps] and bias
        [channels].
        """

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Return what the queries read from the state, own tokens included: [rows, heads, value_dim].

        All float32: query, key [rows, key heads, key_dim]; value [rows, heads, value_dim]; decay, logarithms
        [rows, heads, decay_dim]; beta [rows, heads]. With beta a token adds beta * (value - what its key
        reads from the state) under its key (the delta rule); without, it adds its value.
        """

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        """Return what the queries read from the state, [rows, heads]. Heads have one value each and no delta
        rule. All float32: query, key [rows, key_dim]; value, times [rows, heads]; rates, logarithms [heads,
        key_dim]. Each row of a head's state decays by its rate times the token's time.
        """


class StepOperators(Operators, Protocol):
    """Operators over the states of sequences in state slots."""

    name: str

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        """Begin a step. Each sequence's rows follow its earlier rows or replace draft tokens. A sequence
        that starts at 0 has no state yet.
        """

    def plan_step(self, spans: Sequence[RowSpan], shape: StepShape) -> Tables[np.ndarray] | None:
        """Begin a step like `begin_step`, or return tables for operators that read them on the device: they
        are uploaded with the step's inputs, then `use` begins the step. One shape has one size of tables.
        """
        self.begin_step(spans)
        return None

    def use(self, tables: Tables[Tensor]) -> None:
        """Begin the step that these tables on the device describe."""
        return
