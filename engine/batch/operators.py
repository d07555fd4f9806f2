"""The interface of what recurrent layers compute over tokens; each device has its own implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.batch.recurrent_plan import Tables
from engine.batch.step_inputs import StepShape
from engine.kv.state_slots import RowSpan


class Operators(Protocol):
    """Operators over packed rows. `layer` counts the recurrent layers alone."""

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """inputs [rows, channels], weight [channels, taps], bias [channels]: float32 [rows, channels]."""

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """All float32. query, key [rows, key heads, key_dim], value [rows, heads, value_dim]; decay
        (logarithms) [rows, heads, decay_dim], beta [rows, heads]. With beta a token adds to the state what
        the state lacks of its value under its key, times beta (the delta rule); else its value. Returns what
        the query reads, the token's own part included, [rows, heads, value_dim].
        """

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        """All float32. Heads of one value each, without the delta rule: query, key [rows, key_dim], value,
        times [rows, heads]. Over a token's time each row of a head's state decays at a rate of its own
        (logarithms), [heads, key_dim]. Returns what the query reads, [rows, heads].
        """


class StepOperators(Operators, Protocol):
    """Operators over the states of sequences in state slots."""

    name: str

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        """Each sequence's rows follow others that ran before, or replace drafted ones. One that starts at 0
        has no state yet.
        """

    def plan_step(self, spans: Sequence[RowSpan], shape: StepShape) -> Tables[np.ndarray] | None:
        """As `begin_step`, but operators that read tables on the device return them. The step's inputs bring
        them there, then `use` begins the step. Tables of a bucket's shape have the same sizes.
        """
        self.begin_step(spans)
        return None

    def use(self, tables: Tables[Tensor]) -> None:
        """Begin the step that these tables on the device describe."""
        return
