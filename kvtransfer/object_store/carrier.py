"""What carries parcels and objects between workers. The one implementation is `deploy.ray_carrier`.

Kept to what is needed of it, so that nothing here knows Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

Reference: TypeAlias = Any
"""Names an object in the store, and keeps it there: it goes with the last reference to it, anywhere."""

Handler: TypeAlias = Callable[[bytes, list[Reference]], bool]
"""Takes a parcel that arrived; whether anybody was there for it. Must not block."""


class Carrier(Protocol):
    """Every method may be called from any thread."""

    address: str
    """How peers name this worker."""

    def handle(self, kind: str, handler: Handler) -> None:
        """Give arriving parcels of this kind to `handler`, in a thread of the carrier's."""

    def deliver(
        self,
        address: str,
        kind: str,
        parcel: bytes,
        objects: Sequence[Reference],
        on_done: Callable[[str], None],
    ) -> None:
        """Begin to hand a parcel over. Parcels may overtake each other.

        `on_done` is called once, from some thread: with "" when the peer has taken it, else with the reason.
        """

    def watch(self, address: str, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the address when the worker there ends. Raises OSError if there is none."""

    def put(self, buffers: Sequence[memoryview]) -> Reference:
        """Store a copy of the buffers as one object. Raises OSError."""

    def is_here(self, reference: Reference, timeout_s: float) -> bool:
        """Bring an object to this host; whether it is there within the time. Raises OSError if it is lost."""

    def get(self, reference: Reference) -> list[memoryview]:
        """The buffers of an object that is here, read-only. Raises OSError."""
