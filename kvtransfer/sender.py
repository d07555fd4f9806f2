"""The prefill worker's side: pushes blocks to any number of receivers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtransfer.blocks.device import StreamMark
from kvtransfer.blocks.extents import NO_BLOCKS, Blocks, Mode, blocks_per_part, cut
from kvtransfer.interface import Completed, Failed, RegisteredPool, SendEvent, Sent, TransferError
from kvtransfer.pairs import Pairs, RefusalKind, TransferCounters
from kvtransfer.streams.handshake import Identity
from kvtransfer.streams.link import Candidate, Link, LinkCore
from kvtransfer.streams.pieces import QueuedPiece, TransferTime
from kvtransfer.transports.transport import Transport, host_id
from protocol.handoff import Extent
from protocol.ids import PeerAddress

logger = logging.getLogger("tandem.kvtransfer")

_JOIN_S = 10.0


@dataclass
class _Lease:
    """The transfers of one lease. A failed lease stays until its event has been polled."""

    peer: PeerAddress
    link: Link | None = None
    time: TransferTime = field(default_factory=TransferTime)
    pushed_parts: int = 0
    pushed_final: bool = False
    failed: bool = False
    parts_in_place: int = 0
    blocks_in_place: int = 0
    nbytes: int = 0
    num_extents: int = 0

    @property
    def is_complete(self) -> bool:
        return self.pushed_final and self.parts_in_place == self.pushed_parts


class Sender:
    """The sender of blocks of `pool` to leased blocks of other workers.

    `transports`, which the caller opened and closes, are in order of preference. Only `abort` and `close`
    wait for a peer: each link's own thread connects, at the first `push` or `connect`. `on_event` is called
    from an I/O thread when `poll` has something new; it must not block. A transport on which nothing is
    acknowledged for `progress_timeout_s` seconds counts as broken: its pieces are sent over the next one, and
    the broken one is tried again every `retry_interval_s` seconds. A piece's `checksum` covers none of its
    bytes (`off`), a sample, or all. `pairs` counts the transfers to each peer.
    """

    def __init__(
        self,
        pool: RegisteredPool,
        *,
        key: bytes,
        worker_id: str,
        incarnation: str,
        transports: Sequence[Transport],
        on_event: Callable[[], None],
        progress_timeout_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        abort_timeout_s: float = 1.0,
        retry_interval_s: float = 30.0,
        checksum: Mode = "off",
        pairs: Pairs | None = None,
    ) -> None:
        self._pool = pool
        self._transports = transports
        self._on_event = on_event
        self._abort_timeout_s = abort_timeout_s
        self._counters = TransferCounters()
        self.pairs = pairs or Pairs()
        self._host_id = host_id()
        self._core = LinkCore(
            identity=Identity(key, worker_id, incarnation, pool, checksum),
            counters=self._counters,
            pairs=self.pairs,
            on_ack=self._acknowledged,
            on_refused=self._refused,
            on_down=self._link_down,
            progress_timeout_s=progress_timeout_s,
            connect_timeout_s=connect_timeout_s,
            retry_interval_s=retry_interval_s,
        )
        self._lock = threading.RLock()
        self._links: dict[tuple[str, str], Link] = {}
        self._ending: list[Link] = []
        self._leases: dict[str, _Lease] = {}
        self._events: deque[SendEvent] = deque()
        self._closed = False

    def connect(self, peer: PeerAddress) -> str:
        """Find or start the link to a peer. Return the transport in use, or the transport being tried.

        Raises TransferError if the two have no transport in common.
        """
        with self._lock:
            return self._link(peer).transport

    def wire_dtype(self, peer: PeerAddress) -> str:
        """Return the dtype of values on the transport in use, or being tried, to the peer."""
        with self._lock:
            link = self._links.get((peer.worker_id, peer.incarnation))
        return link.wire_dtype if link is not None else "auto"

    def push(
        self,
        peer: PeerAddress,
        lease_id: str,
        extents: Sequence[Extent],
        first_position: int | Sequence[int],
        num_tokens: int,
        *,
        final: bool,
    ) -> None:
        """Queue blocks of a prompt under the peer's lease, consecutive from `first_position` (one number, or
        one per extent).

        `num_tokens` of the prompt are computed, or will be once all work that the calling thread has launched
        on the pool's device is done. `final` ends the lease, and may come without blocks. The blocks must
        stay untouched until Completed, or until `abort` returns. Later errors come as a Failed event, after
        which the lease is forgotten; until it is polled, further pushes under the lease are ignored. Raises
        ValueError for blocks out of range.
        """
        positions = [first_position] * len(extents) if isinstance(first_position, int) else first_position
        pieces = [
            (extent.block_pool, self._cut(extent, position))
            for extent, position in zip(extents, positions, strict=True)
            if extent.blocks
        ]
        if final and not pieces:
            pieces = [(0, [NO_BLOCKS])]
        after = self._pool.queue.mark()
        with self._lock:
            lease = self._leases.setdefault(lease_id, _Lease(peer))
            if lease.failed:
                return
            if lease.pushed_final or lease.peer.incarnation != peer.incarnation:
                raise ValueError(f"lease {lease_id} is complete, or belongs to another peer")
            try:
                lease.link = lease.link or self._link(peer)
                for number, (block_pool, parts) in enumerate(pieces, 1):
                    is_last = final and number == len(pieces)
                    lease.link.enqueue(
                        self._piece(lease_id, lease, block_pool, parts, num_tokens, is_last, after)
                    )
            except TransferError as error:
                self._fail(lease_id, str(error))
        if lease.failed:
            self._on_event()

    def poll(self) -> list[SendEvent]:
        """Return the events since the last call, except those of aborted leases."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            for event in events:
                if isinstance(event, Failed):
                    self._leases.pop(event.lease_id, None)
        return events

    def abort(self, lease_id: str) -> None:
        """Forget a lease. Idempotent. After this returns none of the lease's source blocks is read.

        With `shm` this waits some milliseconds for the peer to finish the lease's pieces in flight. A peer
        that takes longer than `abort_timeout_s` is disconnected, and ignores blocks that it still reads.
        """
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            self._events = deque(event for event in self._events if event.lease_id != lease_id)
        if lease is not None and lease.link is not None:
            lease.link.abort(lease_id, self._abort_timeout_s)

    def transports(self) -> dict[str, str]:
        """Return the transport in use for each connected peer, by worker id."""
        with self._lock:
            return {link.peer.worker_id: link.transport for link in self._links.values() if link.connected}

    def counters(self) -> dict[str, float]:
        return self._counters.snapshot()

    def close(self) -> None:
        """Drop every link and lease, and end all threads. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values()) + self._ending
            self._leases.clear()
            self._events.clear()
        for link in links:
            link.stop()
        for link in links:
            link.join(_JOIN_S)

    def _cut(self, extent: Extent, first_position: int) -> list[Blocks]:
        block_pools = self._pool.block_pools
        if extent.block_pool >= len(block_pools):
            raise ValueError(f"block pool {extent.block_pool} is not among the pool's {len(block_pools)}")
        max_blocks = blocks_per_part(self._pool.block_bytes)
        return cut(extent.blocks, first_position, block_pools[extent.block_pool], max_blocks)

    def _piece(
        self,
        lease_id: str,
        lease: _Lease,
        block_pool: int,
        parts: list[Blocks],
        num_tokens: int,
        final: bool,
        after: StreamMark,
    ) -> QueuedPiece:
        if final:
            lease.pushed_final, lease.time.final_push = True, time.monotonic()
        index, pushed_s = lease.pushed_parts, time.monotonic() - lease.time.started
        lease.pushed_parts += len(parts)
        return QueuedPiece(lease_id, index, parts, num_tokens, final, after, block_pool, pushed_s)

    def _link(self, peer: PeerAddress) -> Link:
        if self._closed:
            raise TransferError("the sender is closed")
        name = (peer.worker_id, peer.incarnation)
        link = self._links.get(name)
        if link is None or link.down:
            link = Link(peer, self._candidates(peer), self._core)
            link.start()
            self._links[name] = link
        return link

    def _candidates(self, peer: PeerAddress) -> list[Candidate]:
        """Return the peer's offers that can work, best first."""
        offers = {offer.transport: offer for offer in peer.offers}
        candidates, reasons = [], []
        for transport in self._transports:
            offer = offers.get(transport.name)
            refusal: RefusalKind
            if offer is None:
                refusal, reason = "not_offered", "not offered"
            elif (transport.same_host or offer.same_host) and offer.host_id != self._host_id:
                refusal, reason = "other_host", "another host"
            elif reason := transport.fault(self._pool):
                refusal = "unavailable"
            else:
                candidates.append(Candidate(offer, transport))
                continue
            reasons.append(f"{transport.name}: {reason}")
            if self.pairs.refuse(peer.worker_id, transport.name, refusal, reason):
                logger.info("%s does not serve %s: %s", transport.name, peer.worker_id, reason)
        if not candidates:
            raise TransferError(f"no common transport with {peer.worker_id}: {'; '.join(reasons)}")
        return candidates

    def _acknowledged(self, piece: QueuedPiece, transport: str, nbytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            lease = self._leases.get(piece.lease_id)
            if lease is None or lease.failed:
                return
            lease.time.add(piece, now)
            lease.parts_in_place += len(piece.parts)
            lease.blocks_in_place += piece.num_blocks
            lease.nbytes += nbytes
            lease.num_extents += piece.num_runs
            self._events.append(Sent(piece.lease_id, lease.blocks_in_place))
            if lease.is_complete:
                del self._leases[piece.lease_id]
                self._events.append(self._completed(piece.lease_id, lease, transport, now))
        self._on_event()

    def _completed(self, lease_id: str, lease: _Lease, transport: str, now: float) -> Completed:
        seconds = now - lease.time.started
        self._counters.add("leases_completed")
        self._counters.add("lease_seconds", seconds)
        self.pairs.add(
            lease.peer.worker_id,
            transport,
            {
                "kv_transfers_total": 1,
                "kv_transfer_seconds_total": seconds,
                "kv_transfer_busy_seconds_total": lease.time.busy_s(),
                "kv_transfer_hidden_seconds_total": lease.time.busy_s(until=lease.time.final_push),
            },
        )
        return Completed(lease_id, transport, lease.nbytes, lease.num_extents)

    def _refused(self, lease_id: str, reason: str) -> None:
        with self._lock:
            self._fail(lease_id, reason)
        self._on_event()

    def _link_down(self, link: Link, reason: str) -> None:
        with self._lock:
            name = (link.peer.worker_id, link.peer.incarnation)
            if self._links.get(name) is link:
                del self._links[name]
            self._ending = [other for other in self._ending if other.is_alive()] + [link]
            lost = [lease_id for lease_id, lease in self._leases.items() if lease.link is link]
            for lease_id in lost:
                self._fail(lease_id, reason)
        if lost:
            self._on_event()

    def _fail(self, lease_id: str, reason: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.failed:
            return
        lease.failed = True
        self._counters.add("leases_failed")
        transport = lease.link.transport if lease.link is not None else ""
        self.pairs.add(lease.peer.worker_id, transport, {"kv_transfers_failed_total": 1})
        logger.warning("lease %s to %s failed: %s", lease_id, lease.peer.worker_id, reason)
        self._events.append(Failed(lease_id, reason))
