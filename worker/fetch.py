"""Fetches of prefix blocks from another worker's pool: one side asks for blocks, the other lends its own.

    asking -> holding   Fetch   (identities of the wanted blocks, lease, how to reach the asker's pool)
    holding -> asking   Lent    (how many of the blocks hold the draft's KV, too)
    holding -> asking   the cached blocks, pushed under the lease like a prompt's

With recurrent layers, the last block that the holder sends is one after which it keeps their state; it pushes
the state last. A fetch only saves time: if it fails, the worker computes the prefix itself.
"""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.engine import Engine
from engine.kv.layout import DRAFT
from engine.kv.prefix_cache import PrefixRoom, hold_blocks
from engine.kv.sequence_blocks import SequenceBlocks
from kvtransfer.interface import Closed, Completed, Failed, Progress, ReceiveEvent, SendEvent, TransferError
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from protocol.ids import PeerAddress
from protocol.requests import EngineRequest
from protocol.worker_to_worker import Fetch, FetchGranted, FetchRefused
from worker.link import PeerLinks
from worker.parts import Counters
from worker.requests import RequestTable, StagedRequest

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0
"""Seconds without a block after which the worker computes the prefix itself."""


OnEnd = Callable[[EngineRequest, bool], None]
"""A callback that gets the request, and whether the whole prefix is in the cache."""


class FetchStage(enum.Enum):
    ASKED = "asked"
    """The holder may write to the blocks."""
    ABANDONED = "abandoned"
    """The fetch was abandoned during the write of a piece. The blocks are freed when the write ends."""
    ENDED = "ended"


@dataclass(eq=False)
class PrefixFetch(StagedRequest[FetchStage]):
    """The fetch of a prefix, with the blocks for it, for a request that is on this worker or will be.

    The fetch is ENDED when the blocks have arrived, the holder refused, failed or let the deadline pass, or
    the request was aborted. If a piece is being written then, the fetch is ABANDONED until the write ends.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]] = {FetchStage.ASKED: (FetchStage.ABANDONED,)}

    request: EngineRequest
    holder: PeerAddress
    room: PrefixRoom
    started: float
    on_end: OnEnd
    stage: FetchStage = FetchStage.ASKED
    lease_id: str | None = None
    deadline: float | None = None
    lent: FetchGranted | None = None
    """The holder's answer."""
    num_received: int | None = None
    """Number of token blocks in all tables, once all have arrived."""


class PrefixFetcher:
    """The client of other workers' prefix blocks."""

    def __init__(
        self, ours: PeerAddress, engine: Engine, receiver: Receiver, peers: PeerLinks, counters: Counters
    ) -> None:
        self._ours = ours
        self._engine = engine
        self._receiver = receiver
        self._block_size = engine.blocks.block_size
        has_draft_kv = any(segment.name == DRAFT for segment in engine.pool.segments)
        self._has_windows = engine.blocks.has_windows
        self._needs_lent = has_draft_kv or self._has_windows
        """Whether the blocks can be used only after the holder's `FetchGranted`."""
        self._peers = peers
        self._counters = counters
        self.fetches: RequestTable[PrefixFetch] = RequestTable()

    def start(self, request: EngineRequest, holder: PeerAddress, on_end: OnEnd) -> bool:
        """Ask the holder for the missing blocks. Return False if there is no room for them.

        Otherwise call `on_end` once the prefix has arrived or cannot be fetched, unless the request is
        aborted. Raises `InvalidRequestError`.
        """
        if not self._ours.offers:
            return False
        room = self._engine.room_for_prefix(request)
        if room is None:
            return False
        if not room.wanted:
            room.sequence_blocks.free()
            on_end(request, True)
            return True
        now = time.monotonic()
        fetch = PrefixFetch(request, holder, room, now, on_end, deadline=now + FETCH_TIMEOUT_S)
        self.fetches.insert(fetch)
        self.fetches.grant_lease(fetch, secrets.token_hex(8))
        self._receiver.open(fetch.held_lease, room.extents, first_token=room.covered)
        self._peers.send(
            holder,
            Fetch(
                incarnation=holder.incarnation,
                request_id=fetch.request_id,
                lease_id=fetch.held_lease,
                first_block=room.covered // self._block_size,
                identities=room.wanted,
                receiver=self._ours,
            ),
        )
        self._counters.add("prefix_fetches_total")
        return True

    def on_event(self, event: ReceiveEvent) -> bool:
        """Handle an event of one of our leases and return True; return False for others."""
        fetch = self.fetches.with_lease(event.lease_id)
        if fetch is None:
            return False
        match event, fetch.stage:
            case Closed(), FetchStage.ABANDONED:
                fetch.room.sequence_blocks.free()
                self._finish(fetch)
            case Failed(), FetchStage.ASKED:
                self._give_up(fetch, event.reason)
            case Progress(), FetchStage.ASKED:
                fetch.deadline = time.monotonic() + FETCH_TIMEOUT_S
                if event.complete:
                    self._on_complete(fetch, event)
        return True

    def _on_complete(self, fetch: PrefixFetch, event: Progress) -> None:
        if event.arrival is not None and event.arrival.foreign_formats:
            self._give_up(fetch, "the wire changed the blocks' values")
            return
        fetch.num_received = max(event.blocks_received - self._engine.pool.state_blocks, 0)
        self._end_if_complete(fetch)

    def _end_if_complete(self, fetch: PrefixFetch) -> None:
        received = found = fetch.num_received
        if received is None or (fetch.lent is None and self._needs_lent):
            return
        if fetch.lent is not None and self._has_windows:
            found = fetch.lent.num_found
            if received != fetch.room.num_sent(found):
                self._give_up(fetch, f"num_found: {received} blocks came for {found}")
                return
        assert found is not None
        self._counters.add("prefix_blocks_fetched_total", received)
        self._counters.add("prefix_fetch_seconds_total", time.monotonic() - fetch.started)
        self._end(fetch, found)
        fetch.on_end(fetch.request, found == len(fetch.room.wanted))

    def on_lent(self, message: FetchGranted) -> None:
        fetch = self.fetches.get(message.request_id)
        if fetch is None or fetch.lease_id != message.lease_id:
            return
        if message.num_found > len(fetch.room.wanted):
            self._give_up(fetch, f"num_found: {message.num_found} of {len(fetch.room.wanted)} blocks")
            return
        fetch.lent = message
        self._end_if_complete(fetch)

    def on_refused(self, request_id: str, lease_id: str, reason: str) -> None:
        fetch = self.fetches.get(request_id)
        if fetch is not None and fetch.lease_id == lease_id:
            self._give_up(fetch, reason)

    def abort(self, request_id: str) -> None:
        if (fetch := self.fetches.get(request_id)) is not None:
            self._end(fetch, 0)

    def expire(self, now: float) -> None:
        for fetch in self.fetches:
            if fetch.is_overdue(now):
                self._give_up(fetch, f"no block came for {FETCH_TIMEOUT_S:g} s")

    def holders(self) -> set[str]:
        """Return the incarnations of the workers that have yet to answer or to send blocks."""
        return {fetch.holder.incarnation for fetch in self.fetches}

    def _give_up(self, fetch: PrefixFetch, reason: str) -> None:
        self._counters.add("prefix_fetch_failures_total")
        request_id, holder = fetch.request_id, fetch.holder.worker_id
        text = "the prefix of %s, held by %s, is computed here: %s"
        log.warning(text, request_id, holder, reason, extra={"request_id": request_id})
        self._end(fetch, 0)
        fetch.on_end(fetch.request, False)

    def _end(self, fetch: PrefixFetch, num_found: int) -> None:
        """Close the lease. Cache the received blocks, unless a transfer still writes to them."""
        self.fetches.release_id(fetch)
        if self._receiver.close_lease(fetch.held_lease):
            num_drafted = fetch.lent.num_drafted if fetch.lent is not None else 0
            first = fetch.room.covered
            fetch.room.keep(num_found, first + num_drafted * self._block_size)
            self._finish(fetch)
        else:
            fetch.enter(FetchStage.ABANDONED)

    def _finish(self, fetch: PrefixFetch) -> None:
        self.fetches.drop_lease(fetch)
        fetch.enter(FetchStage.ENDED)


class PrefixHolder:
    """The lender of prefix blocks to other workers. Lent blocks stay in the pool until they are sent."""

    def __init__(self, engine: Engine, sender: Sender, counters: Counters) -> None:
        self._counters = counters
        self._engine = engine
        self._sender = sender
        self._lent: dict[str, SequenceBlocks] = {}

    def lend(self, message: Fetch) -> FetchGranted | FetchRefused | None:
        """Push the wanted blocks that are cached here, then the final piece, even without any block.

        Return the answer, or None for a repeated message.
        """
        if message.lease_id in self._lent:
            self._counters.add("duplicate_messages_total")
            return None
        try:
            self._sender.connect(message.receiver)
        except TransferError as error:
            return fetch_refused(message, str(error))
        if self._sender.wire_dtype(message.receiver) != "auto":
            return fetch_refused(message, "the wire between us quantizes")
        first, size = message.first_block, self._engine.blocks.block_size
        lent = hold_blocks(self._engine.blocks, message.identities, first)
        self._lent[message.lease_id] = lent
        num_found = len(lent.identities)
        extents = lent.extents(firsts=lent.first_places)
        num_lent = sum(len(extent.blocks) for extent in extents) - len(lent.state_blocks)
        self._counters.add("prefix_blocks_lent_total", num_lent)
        num_tokens = (first + num_found + len(lent.state_blocks)) * size
        self._sender.push(message.receiver, message.lease_id, extents, first, num_tokens, final=True)
        return FetchGranted(
            request_id=message.request_id,
            lease_id=message.lease_id,
            num_drafted=lent.num_drafted // size,
            num_found=num_found,
        )

    def on_event(self, event: SendEvent) -> bool:
        """Handle an event of one of our leases and return True; return False for others."""
        lent = self._lent.get(event.lease_id)
        if lent is None:
            return False
        if isinstance(event, (Completed, Failed)):
            del self._lent[event.lease_id]
            lent.free()
        return True


def fetch_refused(message: Fetch, reason: str) -> FetchRefused:
    return FetchRefused(request_id=message.request_id, lease_id=message.lease_id, reason=reason[:4096])
