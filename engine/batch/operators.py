"""The interface of recurrent layers' operators; each device has its own implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.batch.recurrent_plan import Tables
from engine.batch.step_inputs import StepShape
from engine.kv.state_slots import RowSpan


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
