"""States of recurrent layers on several ranks. Each rank has all of them; rank 0 alone loads and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.kv.layout import PoolLayout
from engine.kv.state_slots import StateSlots
from engine.parallel.group import Columns, Ranks
from engine.parallel.pools import HeldPool, rank_layout


class WholeBlocks:
    """Whole blocks over the pools of all ranks, for states: only rank 0 reads and writes these. The other
    ranks may copy them in their pools, and from and to host memory. `finish` waits for these copies.
    """

    def __init__(self, layout: PoolLayout, held: Sequence[HeldPool], finish: Callable[[], None]) -> None:
        self._layout, self._held, self._finish, size = layout, held, finish, len(held)
        self._own = [rank_layout(layout, size, rank) for rank in range(size)]
        self.shape = torch.Size((len(held[0].blocks), layout.block_bytes))

    def __getitem__(self, place: tuple[int, slice], /) -> Tensor:
        block, run = place
        whole = self._empty()
        for ours, theirs in self._pairs(whole, block):
            ours.copy_(theirs)
        return whole[0, run]

    def __setitem__(self, place: tuple[int, slice], value: Tensor, /) -> None:
        block, run = place
        whole = self._empty()
        whole[0, run] = value
        for ours, theirs in self._pairs(whole, block):
            theirs.copy_(ours)
        for held in self._held:
            if held.blocks.is_cuda:
                torch.cuda.current_stream(held.blocks.device).synchronize()

    def _empty(self) -> Tensor:
        return torch.zeros((1, self.shape[1]), dtype=torch.uint8, device=self._held[0].blocks.device)

    def _pairs(self, whole: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a whole block with the same parts in the ranks' pools."""
        self._finish()
        views = self._layout.views(whole)
        for layout, held in zip(self._own, self._held, strict=True):
            for name, own in layout.views(held.blocks[block : block + 1]).items():
                ours = views[name].heads(held.heads[name])
                yield ours.values, own.values
                if ours.scales is not None and own.scales is not None:
                    yield ours.scales, own.scales


_STATE_BYTES = 64
"""Bytes of a row in which states are exchanged; `StateLayout` aligns states to it."""


def share_state(ranks: Ranks, states: StateSlots, state_slot: int, num_tokens: int) -> None:
    """Give all ranks the state that rank 0 has loaded into a slot. All ranks must call it."""
    none = range(_STATE_BYTES, _STATE_BYTES)
    columns = Columns((range(_STATE_BYTES), *[none] * (ranks.size - 1)))

    def exchanged(state: Tensor) -> Tensor:
        own = state.view(-1, _STATE_BYTES)[:, : len(columns.parts[ranks.rank])]
        return ranks.gather(own, columns).view(-1)

    states.exchange(state_slot, num_tokens, exchanged)
