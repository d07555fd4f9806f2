"""The interface of a runner: it runs a model's packed forwards over a KV pool."""

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
        wishes: np.ndarray,
        temperatures: np.ndarray,
        vocab_size: int,
        before: Tensor | None = None,
        distributions: Tensor | None = None,
    ) -> np.ndarray:
        """Run the batch's rows, then draft token after token; return int64 [most tokens, sequences].

        `wishes`, int64 [2, sequences], has each sequence's seed and number of tokens to draft, in descending
        order of that number; result entries beyond it are undefined. A sequence's blocks have room for the KV
        of all draft tokens except the last. Only the first `vocab_size` logits count. `temperatures` are
        float32. A draft head also takes the hidden states `before` the rows.

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
