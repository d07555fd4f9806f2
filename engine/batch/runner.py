"""What runs packed forwards of a model over the blocks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.step_inputs import StepInputs


class ForwardOutput(NamedTuple):
    """`logits` [rows asked for, vocab_size]. `hidden` [all rows, captured layers * hidden_size], if any."""

    logits: Tensor
    hidden: Tensor | None


class Runner(Protocol):
    """`choice` says what it is, `products` how its linear layers multiply. With `any_threads` it may run on
    another number of threads at each call: its results have the same bits. From `warm_up` on `deterministic`
    says whether a row's result has the same bits in every batch.
    """

    products: str
    any_threads: bool

    @property
    def deterministic(self) -> bool: ...

    @property
    def choice(self) -> str: ...

    def warm_up(self) -> float:
        """Compile the forward if it is to be; returns the seconds it took."""
        ...

    def run(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """Write the KV of all rows; the logits are those of the packed rows asked for.

        `before` [rows, hidden_size]: for a draft head, the hidden states before the rows.
        """
        ...


@runtime_checkable
class AheadRunner(Protocol):
    """A `Runner` that can run tokens which the host does not know yet."""

    def run_ahead(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        chosen: Tensor,
        *,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """As `run`. In the rows stand places in `chosen`, the tokens on the device. Of the step before nobody
        reads the results any more but the device; these hold until the next call.
        """
        ...


class LateRows(Protocol):
    """What the device knows of a step's rows and the host does not."""

    def fill_rows(self, inputs: StepInputs) -> None: ...


@runtime_checkable
class LateRunner(Protocol):
    """A `Runner` that can run some drafted rows which the host does not know yet."""

    def run_late(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        late: LateRows,
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """As `run`, when `late` has filled in what it knows."""
        ...
