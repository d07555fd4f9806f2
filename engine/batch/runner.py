"""The interface of what runs a model's packed forwards over a KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.batch.rows import BlockTable, RowArrays, SequenceRows
from engine.batch.step_inputs import StepInputs


class Step(NamedTuple):
    """The work of one forward: the rows of each sequence, one sequence after the other."""

    batch: Sequence[SequenceRows]
    logit_rows: Sequence[int]
    """The packed rows that need logits."""
    wants_hidden: bool = True
    hidden: Tensor | None = None
    """For a draft head, [rows, hidden_size]: the hidden state before each row."""


class ForwardOutput(NamedTuple):
    """`logits` [rows asked for, vocab_size], until the runner's next call. `hidden`, if the runner captures
    any: [all rows, captured layers * hidden_size], or a draft head's.
    """

    logits: Tensor
    hidden: Tensor | None


Fill = Callable[[StepInputs], None]
"""Writes into a step's inputs, on the device, what the host does not know yet."""


class ChainDrafter(Protocol):
    """A model that drafts whole chains in one call."""

    vocab_size: int
    block_table: BlockTable

    def draft(
        self,
        batch: RowArrays,
        wishes: np.ndarray,
        temperatures: np.ndarray,
        vocab_size: int,
        before: Tensor | None = None,
        distributions: Tensor | None = None,
    ) -> np.ndarray:
        """Run the batch's rows, then draft token after token; int64 [most tokens, sequences].

        `wishes`, int64 [2, sequences], has each sequence's seed and number of tokens, in descending order of
        the latter; entries beyond that number mean nothing. A sequence's blocks have room for the KV of all
        drafted tokens but the last. Only the first `vocab_size` logits count. `temperatures` are float32. A
        head also takes the hidden states `before` the rows.

        With `distributions`, float32 [sequences, most tokens, width], the draft's distributions over the
        target's `width` token ids are written there, and tokens are drawn from them with noise of
        `Purpose.DRAFT`. Without, tokens are chosen with the target's own noise.
        """


class Runner(Protocol):
    products: str
    """How the linear layers multiply."""
    any_threads: bool
    """Whether results have the same bits on any number of threads, which may change between calls."""
    can_fill: bool
    """Whether `run` takes a `fill`."""

    @property
    def chains(self) -> ChainDrafter | None:
        """Drafts chains with this model; None where that takes a call for each token."""

    @property
    def deterministic(self) -> bool:
        """Whether a row's result has the same bits in every batch. Known after `warm_up`."""

    @property
    def choice(self) -> str:
        """The runner's name, for logs and metrics."""

    def warm_up(self) -> float:
        """Compile or capture the forward, if it can be. Returns the seconds it took."""

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Write the KV of all rows, and compute the logits asked for. `fill` completes the inputs first."""
