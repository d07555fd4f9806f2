"""The operators over tokens other than attention, with torch's own operators: any device and dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.runner import StepOperators
from engine.kv.state_slots import LayerStateSlots, RowSpan, StateSlots


class TorchOperators(StepOperators):
    """Row-by-row operators: the shapes of a row's sums, and so its bits, depend only on its position."""

    name = "torch"

    def __init__(self, state_slots: StateSlots) -> None:
        self._state_slots = state_slots
        self._grid = state_slots.layout.grid
        self._window = state_slots.layout.window
        self._spans: list[tuple[RowSpan, int]] = []
        """The step's spans, each with its state's position: the number of tokens that the state contains."""

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        self._spans = [(span, self._state_slots.run(span)) for span in spans]

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, taps = self._state_slots.layers[layer], weight.float().t()
        rows = inputs.split([span.count for span, _ in self._spans])
        outputs = []
        for (span, base), own in zip(self._spans, rows, strict=True):
            known, origin = self._with_history(of, span, base, own)
            reached = self._reached(span, origin, len(taps) - 1)
            total = known[reached[0]].float() * taps[0]
            for tap in range(1, len(taps)):
                total = total + known[reached[tap]].float() * taps[tap]
            outputs.append(total if bias is None else total + bias.float())
        return torch.cat(outputs)

    def _with_history(
        self, of: LayerStateSlots, span: RowSpan, base: int, rows: Tensor
    ) -> tuple[Tensor, int]:
        """Return the rows after their history, and its first position. Store what later rows will read."""
        tail, inputs = of.tail[span.state_slot], of.inputs[span.state_slot]
        origin, end = base - len(tail), span.start + span.count
        known = torch.cat([tail, inputs[self._slot_places(range(base, span.start))], rows])
        settled = max(base, min(span.certain, end) // self._grid * self._grid)
        tail.copy_(known[settled - base : settled - base + len(tail)])
        kept = range(max(settled, span.start), end)
        inputs[self._slot_places(kept)] = known[kept.start - origin : end - origin]
        return known, origin

    def _reached(self, span: RowSpan, origin: int, reach: int) -> list[slice | list[int]]:
        """Return, for each tap, the rows of `known` that it reads; `known` begins at position `origin`."""
        first = span.start - origin
        if span.masks is None:
            return [slice(first - reach + tap, first - reach + tap + span.count) for tap in range(reach + 1)]
        places = range(span.start, span.start + span.count)
        paths = [[*span.path(place, span.tree_start - reach), place] for place in places]
        return [[path[tap - reach - 1] - origin for path in paths] for tap in range(reach + 1)]

    def _slot_places(self, places: Sequence[int]) -> slice | list[int]:
        """Return the window places of these positions, which ascend."""
        slot_places = [place % self._window for place in places]
        if slot_places and slot_places[-1] - slot_places[0] == len(slot_places) - 1 == places[-1] - places[0]:
            return slice(slot_places[0], slot_places[-1] + 1)
        return slot_places

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        of = self._state_slots.layers[layer]
        out = torch.empty_like(value)
        row = 0
        for span, base in self._spans:
            state_slot = LayerStateSlots(*(part[span.state_slot] for part in of))
            drafted = state_slot.state
            passed: list[int] = []
            end = span.start + span.count
            for place in range(span.start, end):
                base = self._settle(state_slot, base, min(place, span.certain))
                path = span.path(place, base)
                left = len(path) % self._grid
                ahead, pending = path[: len(path) - left], self._slot_places(path[len(path) - left :])
                if ahead != passed:
                    drafted, passed = self._ahead(state_slot, ahead), ahead
                here = state_slot._replace(state=drafted)
                strength = None if beta is None else beta[row]
                rows = query[row], key[row], value[row], decay[row], strength
                out[row] = _read_and_add(here, place % self._window, pending, *rows)
                row += 1
            self._settle(state_slot, base, min(end, span.certain))
        return out

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        of = self._state_slots.layers[layer]
        out = torch.empty_like(value)
        row = 0
        for span, base in self._spans:
            state_slot = LayerStateSlots(*(part[span.state_slot] for part in of))
            state, passed = state_slot.state[..., 0].clone(), list[int]()
            for place in range(span.start, span.start + span.count):
                path = [*span.path(place, base), place]
                if path[: len(passed)] != passed:
                    state, passed = state_slot.state[..., 0].clone(), []
                for other in path[len(passed) :]:
                    at = other % self._window
                    if other == place:  # not earlier: a window's first token may have used this place
                        state_slot.keys[at, 0], state_slot.deltas[at, :, 0], state_slot.decays[at, :, 0] = (
                            key[row],
                            value[row],
                            times[row],
                        )
                    state = _scanned(state, state_slot, at, rates)
                    passed.append(other)
                    if other < span.certain and (other + 1) % self._grid == 0:
                        state_slot.state[..., 0], base, passed = state, other + 1, []
                out[row] = (state * query[row]).sum(-1)
                row += 1
        return out

    def _settle(self, state_slot: LayerStateSlots, base: int, end: int) -> int:
        """Advance the state from `base` to the last grid point up to `end` tokens. Return this grid point."""
        while base + self._grid <= end:
            _advance(state_slot.state, state_slot, self._slot_places(range(base, base + self._grid)))
            base += self._grid
        return base

    def _ahead(self, state_slot: LayerStateSlots, path: Sequence[int]) -> Tensor:
        """Return the state after these drafted tokens, which are whole grids."""
        state = state_slot.state.clone() if path else state_slot.state
        for first in range(0, len(path), self._grid):
            _advance(state, state_slot, self._slot_places(path[first : first + self._grid]))
        return state


def _read_and_add(
    state_slot: LayerStateSlots,
    place: int,
    pending: slice | list[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """Return a row's output, from the state and the later tokens `pending`. Store the row at `place`."""
    decays, keys, deltas = state_slot.decays[pending], state_slot.keys[pending], state_slot.deltas[pending]
    total = decays[-1] + decay if len(decays) else decay
    weights = (total - decays).exp()
    group = len(value) // len(key)
    known = keys.repeat_interleave(group, 1) * weights

    def read(rows: Tensor) -> Tensor:
        rows = rows.repeat_interleave(group, 0)
        recent = ((known * rows).sum(-1, keepdim=True) * deltas).sum(0)
        return ((total.exp() * rows)[..., None] * state_slot.state).sum(1) + recent

    delta = value if beta is None else beta[:, None] * (value - read(key))
    out = read(query) + (query * key).sum(-1).repeat_interleave(group)[:, None] * delta
    state_slot.keys[place], state_slot.deltas[place], state_slot.decays[place] = key, delta, total
    return out


def _scanned(state: Tensor, state_slot: LayerStateSlots, place: int, rates: Tensor) -> Tensor:
    """Return the state [heads, key_dim] after the token at this window place."""
    return (
        state * (state_slot.decays[place] * rates).exp() + state_slot.deltas[place] * state_slot.keys[place]
    )


def _advance(state: Tensor, state_slot: LayerStateSlots, places: slice | list[int]) -> None:
    """Advance a state in place from one grid point to the next, by the tokens at these window places."""
    decays, keys, deltas = state_slot.decays[places], state_slot.keys[places], state_slot.deltas[places]
    total = decays[-1]
    weights = (total - decays).exp()
    state.mul_(total.exp()[..., None])
    group = deltas.shape[1] // keys.shape[1]
    for key, delta, weight in zip(keys, deltas, weights, strict=True):
        weighted = key.repeat_interleave(group, 0) * weight
        state.add_(weighted[..., None] * delta[:, None])
