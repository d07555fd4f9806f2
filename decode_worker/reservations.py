"""One request's reservation, from the decode worker's side, and the queue of those that wait for room."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvtransfer.interface import Arrival
from protocol.handoff import HandoffManifest, SegmentInfo
from protocol.messages import EngineRequest, Reserve, TransferTiming


@dataclass(eq=False)
class Reservation:
    """Blocks that a prefill worker may fill, until `deadline` (monotonic seconds), which progress renews.

    `identity` addresses the prefill worker on the peers' socket. `num_cached` of `block_ids` were filled
    before and are not written. `num_expected` of its own blocks, as `segments` describe them, are pushed.
    `foreign_format` is what the wire is expected to make of their values.
    """

    request: EngineRequest
    identity: bytes
    prefill_worker: str
    prefill_incarnation: str
    ttl_s: float
    lease_id: str
    block_ids: list[int]
    num_cached: int
    num_expected: int
    segments: list[SegmentInfo]
    foreign_format: str
    deadline: float
    num_received: int = 0
    final_piece_received: bool = False
    arrival: Arrival | None = None
    manifest: HandoffManifest | None = None
    manifest_at: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def complete(self) -> bool:
        arrived = self.num_received == self.num_expected and (
            self.final_piece_received or not self.num_expected
        )
        return self.manifest is not None and arrived

    @property
    def complete_since(self) -> float:
        """When the last block was in place (monotonic seconds); without any, when the manifest came."""
        return self.arrival.at if self.arrival is not None else self.manifest_at

    @property
    def came_as_expected(self) -> bool:
        """Whether no wire made anything else of the values than the blocks' identities say."""
        return self.arrival is None or self.arrival.foreign_formats <= {self.foreign_format}

    def timing(self, first_step: float) -> TransferTiming:
        """Of a complete reservation whose request's first decode step began then (monotonic seconds)."""
        assert self.manifest is not None
        timing = TransferTiming(
            reserve_s=self.manifest.reserve_s, handoff_s=max(0.0, first_step - self.complete_since)
        )
        if self.arrival is None:
            return timing
        return msgspec.structs.replace(
            timing,
            transport=self.arrival.transport,
            transferred_bytes=self.arrival.nbytes,
            transfer_s=self.arrival.seconds,
            exposed_s=self.arrival.exposed_s,
            wait_s=self.arrival.wait_s,
        )

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids + self.request.output_token_ids


def blocks_between(first_token: int, num_tokens: int, block_size: int) -> int:
    """How many blocks of `block_size` tokens hold some of the tokens [first_token, num_tokens)."""
    return max(0, -(-num_tokens // block_size) - first_token // block_size)


@dataclass(eq=False)
class PendingReservation:
    """A `Reserve` that found no room yet."""

    message: Reserve
    identity: bytes
    arrival: float

    @property
    def deadline(self) -> float:
        return self.arrival + self.message.ttl_s


@dataclass(eq=False)
class ReservationQueue:
    """First come, first served; nobody overtakes, so that long prompts get their turn."""

    _pending: dict[str, PendingReservation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def push(self, pending: PendingReservation) -> None:
        self._pending[pending.message.request.request_id] = pending

    def head(self) -> PendingReservation | None:
        return next(iter(self._pending.values()), None)

    def get(self, request_id: str) -> PendingReservation | None:
        return self._pending.get(request_id)

    def remove(self, request_id: str) -> PendingReservation | None:
        return self._pending.pop(request_id, None)

    def expired(self, now: float) -> list[PendingReservation]:
        return [pending for pending in self._pending.values() if now >= pending.deadline]
