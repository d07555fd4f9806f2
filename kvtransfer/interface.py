"""What the package's users see: the registered pool, the events and the errors."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import TandemError


class TransferError(TandemError):
    """A peer can't be reached, or it refused us or a piece; the message says why."""


@dataclass(frozen=True, eq=False)
class RegisteredPool:
    """A KV pool as the wires see it: `num_blocks` blocks of `block_bytes` bytes each, one after the other.

    `format` describes what a block holds; two pools exchange blocks only if it is equal. `memory_fd` is the
    file behind `buffer` (from offset 0) where there is one: without it the `shm` transport is not used.
    """

    buffer: memoryview
    block_bytes: int
    num_blocks: int
    format: str = ""
    memory_fd: int | None = None

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.num_blocks < 1:
            raise ValueError(
                f"block_bytes {self.block_bytes} and num_blocks {self.num_blocks} must be positive"
            )
        flat = memoryview(self.buffer).cast("B")
        if flat.readonly:
            raise ValueError("buffer must be writable")
        if flat.nbytes < self.nbytes:
            raise ValueError(f"buffer of {flat.nbytes} bytes is smaller than the pool's {self.nbytes}")
        object.__setattr__(self, "buffer", flat)

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True)
class Progress:
    """Receiver: `blocks_received` blocks of the lease are in place; `complete` after the final piece."""

    lease_id: str
    blocks_received: int
    complete: bool = False


@dataclass(frozen=True)
class Sent:
    """Sender: the first `blocks` blocks pushed under the lease are in place there and free again here."""

    lease_id: str
    blocks: int


@dataclass(frozen=True)
class Completed:
    """Sender: the peer has every piece of the lease. `seconds` since the lease's first push."""

    lease_id: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Either side: nothing more will come of this lease."""

    lease_id: str
    reason: str


ReceiveEvent = Progress | Failed
SendEvent = Sent | Completed | Failed
