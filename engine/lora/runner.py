"""What runs a model on a GPU beside adapters: two runners of the same weights and the same KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from engine.late_tokens import LateTokens
from engine.lora.layers import begin_step
from engine.rows import SequenceRows
from engine.runner import AheadRunner, ForwardOutput, LateRunner, Runner


class StepRunner(Runner, AheadRunner, LateRunner, Protocol):
    """A `Runner` that also takes tokens which the host does not know yet."""


class AdaptedRunner:
    """Steps in which some row has an adapter are `adapted`'s, all others `plain`'s, which knows of none."""

    any_threads = False

    def __init__(self, plain: StepRunner, adapted: StepRunner) -> None:
        self.plain, self.adapted = plain, adapted
        self.products = plain.products

    @property
    def choice(self) -> str:
        return f"{self.plain.choice}; steps with adapters by the model's own modules, eager"

    def warm_up(self) -> float:
        return self.plain.warm_up() + self.adapted.warm_up()

    def run(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        *,
        wants_hidden: bool = True,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """As `Runner.run`."""
        with self._runner_of(batch) as runner:
            return runner.run(batch, logit_rows, wants_hidden=wants_hidden, before=before)

    def run_ahead(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        chosen: Tensor,
        *,
        before: Tensor | None = None,
    ) -> ForwardOutput:
        """As `AheadRunner.run_ahead`."""
        with self._runner_of(batch) as runner:
            return runner.run_ahead(batch, logit_rows, chosen, before=before)

    def run_late(
        self,
        batch: Sequence[SequenceRows],
        logit_rows: list[int],
        late: LateTokens,
        *,
        wants_hidden: bool = True,
    ) -> ForwardOutput:
        """As `LateRunner.run_late`."""
        with self._runner_of(batch) as runner:
            return runner.run_late(batch, logit_rows, late, wants_hidden=wants_hidden)

    @contextmanager
    def _runner_of(self, batch: Sequence[SequenceRows]) -> Iterator[StepRunner]:
        """Then the modules add nothing any more: `plain` and who drafts may run them, too."""
        try:
            yield self.adapted if any(rows.adapter for rows in batch) else self.plain
        finally:
            begin_step(())
