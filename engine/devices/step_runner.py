"""Runs a model's forward step by step: the part that all runners in torch share.

A runner makes a step's inputs and has a forward compute them. Runners differ in what runs then: the forward
itself, its compiled form, or a graph that was captured of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.batch.runner import Fill, ForwardOutput, Step, StepOperators
from engine.batch.step_inputs import BlockTable, SequenceRows, StepInputs, StepShape, span_of, step_inputs
from engine.copies import Upload
from engine.kv.attention import AttentionBackend
from engine.lora.table import Adapters

Outputs = tuple[Tensor, Tensor | None]
"""Logits, and hidden states, if the forward has some."""


class Forward(Protocol):
    """A model as a function of a step's inputs."""

    name: str
    adapters: Adapters | None
    no_hidden: Tensor | None
    """[0, hidden_size] for a draft head, which takes hidden states with its rows."""
    hidden_of_all: bool
    """Whether a draft head returns the hidden states of all rows, not only of the rows asked for."""

    @property
    def operators(self) -> StepOperators | None:
        """The operators of recurrent layers, where the model has some."""

    def forward(self, inputs: StepInputs) -> Outputs:
        """Return logits of the rows asked for, and hidden states: a draft head's, or those that are captured
        of all rows. Backend and operators have begun the step.
        """


class StepRunner(ABC):
    """A `Runner` of a forward over packed rows."""

    any_threads = deterministic = False
    can_fill = True
    chains = None

    def __init__(self, forward: Forward, backend: AttentionBackend, products: str) -> None:
        self.products = products
        self._forward, self._backend = forward, backend
        self._block_table = BlockTable(backend.block_size, backend.num_tables)

    @torch.inference_mode()
    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        shape = self._shape_of(step)
        inputs = self._inputs(step, shape)
        if fill is not None:
            fill(inputs)
        self._backend.plan(inputs.attention)
        (logits, hidden), is_overwritten = self._execute(inputs, step.batch, shape)
        logits = logits[: len(step.logit_rows)]
        if hidden is None or not step.wants_hidden:
            return ForwardOutput(logits, None)
        if self._forward.no_hidden is not None and not self._forward.hidden_of_all:
            return ForwardOutput(logits, hidden[: len(step.logit_rows)])  # which the next call reads first
        hidden = hidden[: sum(len(rows.token_ids) for rows in step.batch)]
        return ForwardOutput(logits, hidden.clone() if is_overwritten else hidden)

    @abstractmethod
    def _shape_of(self, step: Step) -> StepShape:
        """Return the least sizes of the step's inputs."""

    @abstractmethod
    def _uploader(self, shape: StepShape) -> Upload:
        """Return what puts the inputs of a step of this shape on the device."""

    @abstractmethod
    def _execute(
        self, inputs: StepInputs, batch: Sequence[SequenceRows], shape: StepShape
    ) -> tuple[Outputs, bool]:
        """Compute a step. Also return whether the next call overwrites the outputs."""

    def _inputs(self, step: Step, shape: StepShape) -> StepInputs:
        batch, forward, tables, addresses = step.batch, self._forward, None, None
        if forward.operators is not None:
            tables = forward.operators.plan_step([span_of(rows) for rows in batch], shape)
        if shape.adapters and forward.adapters is not None:
            addresses = forward.adapters.addresses(batch)
        upload, rows = self._uploader(shape), step.logit_rows
        inputs = step_inputs(batch, rows, upload, self._block_table, shape, tables, addresses)
        if forward.no_hidden is None:
            return inputs
        hidden = forward.no_hidden if step.hidden is None else step.hidden
        return inputs._replace(hidden=self._placed(hidden, len(inputs.token_ids)))

    def _placed(self, hidden: Tensor, rows: int) -> Tensor:
        """Return the hidden states before a step's rows, with those of padding."""
        return pad(hidden, (0, 0, 0, rows - len(hidden)))

    def _compute(self, inputs: StepInputs) -> Outputs:
        self._backend.begin_step(inputs.attention)
        if self._forward.operators is not None and inputs.recurrent is not None:
            self._forward.operators.use(inputs.recurrent)
        return self._forward.forward(inputs)
