"""KV pools of ranks that have one each, for their own heads. Block numbers are the same on all ranks.

Rank 0 maps the other ranks' pools, so it moves blocks through host memory without their help. Every forward
ends with a gather of its logits, which on a GPU follows the other ranks' writes of KV. So what rank 0 does
after its own forward comes after those writes, too.

Each rank has all states of recurrent layers; rank 0 alone loads and saves these.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.kv.tiers.host import HostMemory
from engine.parallel import messages
from engine.parallel.division import keys_of
from engine.parallel.group import Columns, Ranks
from engine.parallel.messages import READY, LentPool
from protocol.errors import UnsupportedModelError
from protocol.handoff import SegmentInfo


def rank_layout(layout: PoolLayout, size: int, rank: int) -> PoolLayout:
    """Return the layout of a rank's pool: its heads of the target's KV. Only rank 0 has a draft's KV."""
    target, *others = layout.groups
    if any(place.shape is not None for place in target.layers):
        raise UnsupportedModelError("layers with KV of several shapes cannot be divided among ranks")
    segments = tuple(
        replace(segment, num_kv_heads=len(keys_of(segment.num_kv_heads, size)[rank]))
        for segment in target.segments
    )
    own = replace(target, segments=segments)
    if rank == 0:
        return replace(layout, groups=(own, *others))
    return replace(layout, groups=(own,), draft_state=None)


@dataclass(eq=False)
class HeldPool:
    """A rank's pool as rank 0 sees it: `blocks` is uint8 [num_blocks, block bytes of this rank]. `heads` has,
    by segment name, the rank's range of all heads.
    """

    blocks: Tensor
    segments: tuple[SegmentInfo, ...]
    heads: dict[str, slice]


def held_pool(blocks: Tensor, layout: PoolLayout, size: int, rank: int) -> HeldPool:
    """Describe a rank's pool. `layout` is the layout of blocks with all heads."""
    target = {layout.groups[0].segment_name(index) for index in range(len(layout.groups[0].segments))}
    own = rank_layout(layout, size, rank)
    heads = {}
    for name in own.segments:
        count = layout.segments[name].num_kv_heads
        kept = keys_of(count, size)[rank] if name in target else range(count)
        heads[name] = slice(kept.start, kept.stop)
    return HeldPool(blocks, tuple(own.describe()), heads)


class LeadingPool(KVPool):
    """Rank 0's pool. It has the other ranks change theirs in the same way. It describes whole blocks."""

    def __init__(
        self,
        layout: PoolLayout,
        num_blocks: int,
        device: torch.device,
        size: int,
        call: Callable[..., None],
    ) -> None:
        """Make the pool. `call` has the other ranks call a function by name."""
        super().__init__(rank_layout(layout, size, 0), num_blocks, device, None)
        self.whole, self.segments, self.state_blocks = layout, layout.describe(), layout.state_blocks
        self._size, self._call = size, call

    @property
    def block_bytes(self) -> int:
        each = (rank_layout(self.whole, self._size, rank).block_bytes for rank in range(self._size))
        return sum(each)

    def copy_block(self, source: int, target: int) -> None:
        self._call("copy_block", source, target)
        super().copy_block(source, target)

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None:
        self._call("move_tokens", [[*table] for table in tables], first, [*places])
        super().move_tokens(tables, first, places)


class LeadingMemory(HostMemory):
    """Rank 0's slots in host memory. The others copy their parts, too; `finish` waits for their copies."""

    def __init__(
        self,
        pool: LeadingPool,
        num_slots: int,
        call: Callable[..., None],
        finish: Callable[[], None],
    ) -> None:
        call("allocate_slots", num_slots)  # before our own: pinning memory takes seconds
        super().__init__(pool.memory, num_slots)
        self.block_bytes = pool.block_bytes
        self._call, self._finish = call, finish

    def save(self, block: int, slot: int) -> None:
        self._call("save", block, slot)
        super().save(block, slot)

    def load(self, slot: int, block: int) -> None:
        self._call("load", slot, block)
        super().load(slot, block)

    def finish(self) -> None:
        super().finish()
        self._finish()


def lend_pool(layout: PoolLayout, num_blocks: int, device: torch.device, link: socket.socket) -> KVPool:
    """Allocate a rank's pool, and send rank 0 the handle that maps it."""
    if device.type == "cuda":
        pool = KVPool(layout, num_blocks, device, None)
        handle = pool.memory.untyped_storage()._share_cuda_()
        messages.send(link, messages.encode(LentPool([*handle])))
        return pool
    fd = os.memfd_create("tandem-rank-pool", os.MFD_CLOEXEC)
    pool = KVPool(layout, num_blocks, device, lambda nbytes: _mapped(fd, nbytes))
    socket.send_fds(link, [READY], [fd])
    os.close(fd)
    return pool


def borrow_pool(
    layout: PoolLayout, num_blocks: int, device: torch.device, link: socket.socket
) -> Tensor | None:
    """Map the pool that a rank lends: uint8 [num_blocks, block bytes]; None if the rank is gone."""
    shape = num_blocks, layout.block_bytes
    if device.type == "cuda":
        message = messages.receive(link, messages.lent)
        if message is None:
            return None
        storage = torch.UntypedStorage._new_shared_cuda(*message.handle)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, shape)
    memory = messages.receive_mapping(link)
    return None if memory is None else torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _mapped(fd: int, nbytes: int) -> memoryview:
    os.ftruncate(fd, nbytes)
    return memoryview(mmap.mmap(fd, nbytes))


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
