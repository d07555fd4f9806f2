"""The package's public types: the registered pool, the events and the errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtransfer.blocks.device import HOST, Queue
from kvtransfer.blocks.layout import JoinedBlocks
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo


class TransferError(TandemError):
    """A peer can't be reached, or it refused us or a piece; the message says why."""


@dataclass(frozen=True, eq=False)
class RegisteredPool:
    """A KV pool: `num_blocks` blocks of `block_bytes` bytes each, one after the other. Each block table of a
    sequence is a block pool of its own over the same blocks.

    `buffer` holds blocks in host memory. `device` holds blocks on a GPU, or on several that have some KV
    heads each: uint8 [num_blocks, block_bytes], read and written by work launched in `queue`.

    `segments` describe a block's content. Without segments a block is opaque bytes, which fit only a pool of
    blocks of the same size. `memory_fd` is the file that backs `buffer` (from offset 0), which the `shm`
    transport needs.
    """

    buffer: memoryview
    block_bytes: int
    num_blocks: int
    segments: tuple[SegmentInfo, ...] = ()
    memory_fd: int | None = None
    device: Tensor | JoinedBlocks | None = None
    queue: Queue = HOST
    num_tables: int = 1

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.num_blocks < 1:
            raise ValueError(
                f"block_bytes {self.block_bytes} and num_blocks {self.num_blocks} must be positive"
            )
        flat = memoryview(self.buffer).cast("B")
        if flat.readonly:
            raise ValueError("buffer must be writable")
        if self.device is not None:
            if self.device.shape != (self.num_blocks, self.block_bytes) or self.device.dtype != torch.uint8:
                raise ValueError(f"device must be uint8 [{self.num_blocks}, {self.block_bytes}]")
            flat = memoryview(bytearray())
        elif flat.nbytes < self.nbytes:
            raise ValueError(f"buffer of {flat.nbytes} bytes is smaller than the pool's {self.nbytes}")
        object.__setattr__(self, "buffer", flat)

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def block_pools(self) -> tuple[int, ...]:
        """Return the number of blocks of each block pool."""
        return (self.num_blocks,) * self.num_tables

    @property
    def block_size(self) -> int:
        """Return the tokens per block; 1 for a pool without segments."""
        return self.segments[0].shape[2] if self.segments else 1


@dataclass(frozen=True)
class Arrival:
    """Receiver: the timing of a lease's blocks.

    The last block was in place at `at` (monotonic), `seconds` after the first push. `exposed_s` is the part
    of `seconds` after the final push, when the prompt was computed. `wait_s` is the time that pieces waited
    for their turn, summed. `nbytes` is the number of bytes on the wire, `transport` the transport of the last
    piece. `foreign_formats` are the non-empty values of `layout.foreign_format` for the received pieces.
    """

    at: float
    transport: str
    nbytes: int
    seconds: float
    exposed_s: float
    wait_s: float
    foreign_formats: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Progress:
    """Receiver: `blocks_received` of the sender's blocks are in place; `complete` after every piece."""

    lease_id: str
    blocks_received: int
    complete: bool = False
    arrival: Arrival | None = field(default=None, compare=False)
    """Set together with `complete`."""


@dataclass(frozen=True)
class Closed:
    """Receiver: the last write under a closed lease is over; its blocks may be used again."""

    lease_id: str


@dataclass(frozen=True)
class Sent:
    """Sender: `blocks` of the blocks pushed under the lease are in place."""

    lease_id: str
    blocks: int


@dataclass(frozen=True)
class Completed:
    """Sender: the peer has every piece of the lease: `nbytes` bytes on the wire in `num_extents` extents."""

    lease_id: str
    transport: str
    nbytes: int
    num_extents: int


@dataclass(frozen=True)
class Failed:
    """Either side: the lease has failed. No more events of the lease follow."""

    lease_id: str
    reason: str


ReceiveEvent = Progress | Closed | Failed
SendEvent = Sent | Completed | Failed
