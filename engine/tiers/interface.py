"""What the block manager and the scheduler ask of the tiers below the device pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protocol.ids import BlockIdentity


class Evicted(NamedTuple):
    """A published block of the device pool whose room is wanted; its content is still there."""

    identity: BlockIdentity
    block: int


class LowerTier(Protocol):
    """Keeps published blocks by their identity. Copies are in order with whatever uses the device pool."""

    def holds(self, identity: BlockIdentity) -> bool:
        """Whether `load` would find the block now."""

    def touch(self, identities: Sequence[BlockIdentity]) -> None:
        """They are about to be loaded; the first is the last to be given up."""

    def save(self, evicted: Sequence[Evicted]) -> None:
        """Keep what these device blocks hold; the caller then overwrites them."""

    def load(self, identities: Sequence[BlockIdentity], block_ids: Sequence[int]) -> int:
        """Copy into the device blocks until the first that is no longer here; returns how many were."""

    def count_misses(self, num_blocks: int) -> None:
        """So many full blocks of an admitted prompt were in no tier."""


@dataclass(eq=False)
class DiskFetch:
    """Blocks on their way from the disk, for a waiting sequence. Times are `time.monotonic()`."""

    deadline: float
    remaining: int = 0
    expired: bool = False


class Fetcher(Protocol):
    def fetch(self, identities: Iterable[BlockIdentity]) -> DiskFetch:
        """Begin to bring those of a prompt's next blocks that lie on the disk within reach of `load`."""

    def is_pending(self, fetch: DiskFetch) -> bool:
        """Whether waiting for it makes sense: some are still to come, and the deadline has not passed."""


class Tiers(LowerTier, Fetcher, Protocol):
    """Both sides."""
