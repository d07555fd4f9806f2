"""One request on a decode worker, from its reservation to its last token."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from engine.step.live_sequences import Reservation
from kvtransfer.interface import Arrival, Progress
from protocol.handoff import HandoffManifest, SamplingState
from protocol.ids import token_ids_digest
from protocol.outputs import RequestTiming, TransferTiming
from protocol.requests import DraftPlan, EngineRequest
from protocol.worker_to_worker import Reserve
from worker.requests import StagedRequest


class DecodeStage(enum.Enum):
    QUEUED = "queued"
    """A prefill worker has asked for blocks, and there is no room yet."""
    RESERVED = "reserved"
    """The prefill worker may write to the blocks, until all blocks and the manifest have arrived."""
    CLOSING = "closing"
    """All blocks have arrived and the lease is closed, but a second copy of a piece is still being written.
    """
    RUNNING = "running"
    """The engine decodes the request and owns its blocks."""
    ABANDONED = "abandoned"
    """The request was abandoned during the write of a piece. The blocks are freed when that write ends."""
    ENDED = "ended"


@dataclass(eq=False)
class DecodeRequest(StagedRequest[DecodeStage]):
    """A request that a prefill worker hands over, or one that runs here whole.

    | stage             | what happens                                             | next                 |
    |-------------------|----------------------------------------------------------|----------------------|
    | (new)             | `Reserve`                                                | QUEUED               |
    | (new)             | `Generate`                                               | RUNNING              |
    | QUEUED            | there is room: a lease is granted                        | RESERVED             |
    | QUEUED            | the engine refuses it, the deadline, `Release`, `Abort`  | ENDED                |
    | RESERVED          | some blocks or the manifest, or the same `Reserve` again | (a later deadline)   |
    | RESERVED          | the last of all blocks and the manifest                  | RUNNING (or CLOSING) |
    | CLOSING           | `Closed`: the last write is over                         | RUNNING              |
    | RESERVED, CLOSING | the deadline, a failed transfer, a wrong manifest,       | ENDED (or ABANDONED) |
    |                   | another prefill worker's `Reserve`, `Release`, `Abort`   |                      |
    | ABANDONED         | `Closed`: the last write is over                         | ENDED                |
    | RUNNING           | the last token, an error, `Release`, `Abort`             | ENDED                |

    The stage in brackets follows if a piece is still being written. Until RUNNING the request owns the blocks
    of its `reservation`; then the engine owns them. `identity` addresses the prefill worker on the peers'
    socket, and `foreign_format` is the expected format of the blocks' values after the wire's conversion.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]] = {
        DecodeStage.QUEUED: (DecodeStage.RESERVED,),
        DecodeStage.RESERVED: (DecodeStage.CLOSING, DecodeStage.RUNNING, DecodeStage.ABANDONED),
        DecodeStage.CLOSING: (DecodeStage.RUNNING, DecodeStage.ABANDONED),
    }

    request: EngineRequest
    stage: DecodeStage
    reserve: Reserve | None = None
    identity: bytes = b""
    foreign_format: str = ""
    num_places: int = 0
    """Number of KV places of a handed-over prompt. The engine computes it and `state_position`."""
    state_position: int = 0
    asked_at: float = 0.0
    lease_id: str | None = None
    deadline: float | None = None
    reservation: Reservation | None = None
    num_received: int = 0
    received_final: bool = False
    arrival: Arrival | None = None
    manifest: HandoffManifest | None = None
    manifest_at: float = 0.0
    running_since: float = 0.0

    @property
    def message(self) -> Reserve:
        """The prefill worker's `Reserve`. Whole requests have no such message."""
        assert self.reserve is not None
        return self.reserve

    @property
    def granted(self) -> Reservation:
        """The blocks of a request that has a lease."""
        assert self.reservation is not None
        return self.reservation

    @property
    def num_expected(self) -> int:
        """Number of blocks to receive over all tables."""
        size = self.message.segments[0].shape[2]
        end = -(-self.num_places // size)
        return sum(max(0, end - first // size) for first in self.granted.first_tokens)

    def replan(self, plan: DraftPlan | None) -> None:
        super().replan(plan)
        if self.reservation is not None:
            self.reservation = replace(self.reservation, request=self.request)

    def renew(self, now: float) -> None:
        """Extend the deadline, because the prefill worker made progress."""
        self.deadline = now + self.message.ttl_s

    def record(self, progress: Progress) -> None:
        self.num_received = progress.blocks_received
        self.received_final = progress.complete
        self.arrival = progress.arrival or self.arrival

    @property
    def is_complete(self) -> bool:
        """Whether all blocks and the manifest have arrived."""
        expected = self.num_expected
        return self.manifest is not None and (
            expected == 0 or (self.received_final and self.num_received == expected)
        )

    @property
    def came_as_expected(self) -> bool:
        """Whether each wire delivered the values in the format that the blocks' identities imply."""
        return self.arrival is None or self.arrival.foreign_formats <= {self.foreign_format}

    def expected_manifest(self, manifest: HandoffManifest, incarnation: str) -> HandoffManifest:
        """Return the manifest to expect, with `first_token`, `draft` and `reserve_s` of `manifest`."""
        message, token_ids = self.message, self.token_ids
        return HandoffManifest(
            request_id=self.request_id,
            lease_id=self.lease_id or "",
            prefill_worker=message.prefill_worker,
            prefill_incarnation=message.prefill_incarnation,
            decode_incarnation=incarnation,
            num_tokens=self.num_tokens,
            token_ids_digest=token_ids_digest(token_ids),
            segments=message.segments,
            state_position=self.state_position,
            extents=self.granted.extents,
            pushed_blocks=self.num_expected,
            first_token=manifest.first_token,
            first_token_position=self.num_tokens,
            sampling=SamplingState(
                seed=self.request.sampling.seed, num_output_tokens=len(self.request.output_token_ids) + 1
            ),
            draft=manifest.draft,
            reserve_s=manifest.reserve_s,
        )

    def timing(self, first_step: float) -> RequestTiming:
        """Return the times of transfer and wait. The first decode step began at `first_step`."""
        queue_s = max(0.0, first_step - self.running_since)
        return RequestTiming(transfer=self._transfer_timing(first_step), decode_queue_s=queue_s)

    def _transfer_timing(self, first_step: float) -> TransferTiming:
        assert self.manifest is not None
        # Without blocks to wait for, the request is ready when the manifest is here.
        ready = self.arrival.at if self.arrival is not None else self.manifest_at
        timing = TransferTiming(reserve_s=self.manifest.reserve_s, handoff_s=max(0.0, first_step - ready))
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
