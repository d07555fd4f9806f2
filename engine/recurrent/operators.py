"""The two operators over tokens beside attention, with torch's own operators: any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.recurrent.seats import LayerSeats, Seats


@dataclass(frozen=True, slots=True)
class RowSpan:
    """`count` packed rows of one sequence: tokens from position `start` on, its state in `seat`."""

    seat: int
    start: int
    count: int


class Operators(Protocol):
    """Of packed rows. `layer` counts the recurrent layers alone."""

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """inputs [rows, channels], weight [channels, taps], bias [channels]: float32 [rows, channels]."""
        ...

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """All float32. query, key [rows, key heads, key_dim], value [rows, heads, value_dim]; decay (a
        logarithm) and beta [rows, heads]. With beta a token adds to the state what the state lacks of its
        value under its key, times beta (the delta rule); else its value. Returns what the query reads, the
        token's own part included, [rows, heads, value_dim].
        """
        ...


class StepOperators(Operators, Protocol):
    """Of sequences in seats."""

    name: str

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        """Each sequence's rows follow those that ran before. One that starts at 0 has no state yet."""
        ...


class TorchOperators:
    """Row by row: the shapes of a row's sums depend on its position alone, and so do its bits."""

    name = "torch"

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._grid = seats.layout.grid
        self._spans: Sequence[RowSpan] = ()

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        self._spans = spans
        for span in spans:
            if span.start == 0:
                self._seats.clear(span.seat)

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, taps = self._seats.layers[layer], weight.float().t()
        rows = inputs.split([span.count for span in self._spans])
        outputs = []
        for span, own in zip(self._spans, rows, strict=True):
            known = self._with_history(of, span, own).float()
            total = known[: span.count] * taps[0]
            for tap in range(1, len(taps)):
                total = total + known[tap : tap + span.count] * taps[tap]
            outputs.append(total if bias is None else total + bias.float())
        return torch.cat(outputs)

    def _with_history(self, of: LayerSeats, span: RowSpan, rows: Tensor) -> Tensor:
        """The rows behind the inputs before them that they reach. Keeps what later rows will reach."""
        reach = of.tail.shape[1]
        done = span.start % self._grid
        tail, inputs = of.tail[span.seat], of.inputs[span.seat]
        known = torch.cat([tail, inputs[:done], rows])
        behind = (span.start + span.count) % self._grid
        if done + span.count >= self._grid:
            first = len(known) - behind - reach
            tail.copy_(known[first : first + reach])
            inputs[:behind] = known[len(known) - behind :]
        else:
            inputs[done:behind] = rows
        return known[done:]

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        of = self._seats.layers[layer]
        out = torch.empty_like(value)
        row = 0
        for span in self._spans:
            seat = LayerSeats(*(part[span.seat] for part in of))
            for position in range(span.start, span.start + span.count):
                strength = None if beta is None else beta[row]
                place = position % self._grid
                out[row] = _read_and_add(seat, place, query[row], key[row], value[row], decay[row], strength)
                if place == self._grid - 1:
                    _advance(seat)
                row += 1
        return out


def _read_and_add(
    seat: LayerSeats,
    place: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """One row, `place` tokens behind the grid point."""
    total = decay if place == 0 else seat.decays[place - 1] + decay
    weights = (total - seat.decays[:place]).exp()
    kept = total.exp()[:, None]
    group = len(value) // len(key)

    def read(rows: Tensor) -> Tensor:
        scores = (seat.keys[:place] * rows).sum(-1).repeat_interleave(group, 1) * weights
        recent = (scores[..., None] * seat.deltas[:place]).sum(0)
        return kept * (rows.repeat_interleave(group, 0)[..., None] * seat.state).sum(1) + recent

    delta = value if beta is None else beta[:, None] * (value - read(key))
    seat.keys[place], seat.deltas[place], seat.decays[place] = key, delta, total
    return read(query) + (query * key).sum(-1).repeat_interleave(group)[:, None] * delta


def _advance(seat: LayerSeats) -> None:
    """From the state at a grid point to that at the next one."""
    total = seat.decays[-1]
    weights = (total - seat.decays).exp()
    seat.state.mul_(total.exp()[:, None, None])
    group = seat.deltas.shape[1] // seat.keys.shape[1]
    for key, delta, weight in zip(seat.keys, seat.deltas, weights, strict=True):
        weighted = key.repeat_interleave(group, 0) * weight[:, None]
        seat.state.add_(weighted[..., None] * delta[:, None])
