"""Prefix blocks from another worker's pool: one side asks for what it lacks, the other lends what it has.

    asking -> holding   Fetch   (identities of the wanted blocks, lease, how to reach the asker's pool)
    holding -> asking   those that it has cached, pushed under the lease like a prompt's

The blocks are worth having and never needed: whatever goes wrong, the request computes them itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_manager import BlockTable
from engine.engine import Engine
from engine.prefix import PrefixRoom
from kvtransfer.interface import Closed, Completed, Failed, Progress, ReceiveEvent, SendEvent, TransferError
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from protocol.messages import Fetch, Generate, PeerAddress
from worker.counters import Counters
from worker.mail import MailLinks
from worker.peer_links import PeerLinks

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0
"""Seconds without a block after which a prefix is computed instead."""


@dataclass(eq=False)
class _Fetch:
    message: Generate
    holder: PeerAddress
    lease_id: str
    room: PrefixRoom
    started: float
    deadline: float

    @property
    def request_id(self) -> str:
        return self.message.request.request_id


class PrefixFetcher:
    """The asking side. `go_on` gets each request once its prefix is here, or is not to be had."""

    def __init__(
        self,
        ours: PeerAddress,
        engine: Engine,
        receiver: Receiver,
        peers: PeerLinks | MailLinks,
        counters: Counters,
        go_on: Callable[[Generate], None],
    ) -> None:
        self._ours = ours
        self._engine = engine
        self._receiver = receiver
        self._peers = peers
        self._counters = counters
        self._go_on = go_on
        self._fetches: dict[str, _Fetch] = {}
        self._by_lease: dict[str, _Fetch] = {}
        self._closing: dict[str, BlockTable] = {}
        """Leases that are over, with blocks that somebody still writes to."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._fetches

    def start(self, message: Generate, holder: PeerAddress) -> bool:
        """Ask the holder for what is missing; False if nothing is, or there is no room for it.

        Raises `InvalidRequestError`.
        """
        if not self._ours.offers:
            return False
        room = self._engine.room_for_prefix(message.request)
        if room is None:
            return False
        now = time.monotonic()
        fetch = _Fetch(message, holder, secrets.token_hex(8), room, now, now + FETCH_TIMEOUT_S)
        self._fetches[fetch.request_id] = self._by_lease[fetch.lease_id] = fetch
        self._receiver.open(fetch.lease_id, room.table.block_ids, first_block=room.num_cached)
        self._peers.send(
            holder,
            Fetch(
                incarnation=holder.incarnation,
                request_id=fetch.request_id,
                lease_id=fetch.lease_id,
                first_block=room.num_cached,
                identities=room.wanted,
                receiver=self._ours,
            ),
        )
        self._counters.add("prefix_fetches_total")
        return True

    def on_event(self, event: ReceiveEvent) -> bool:
        """Whether the event was about a lease of ours."""
        if isinstance(event, Closed):
            return self._on_closed(event.lease_id)
        fetch = self._by_lease.get(event.lease_id)
        if fetch is None:
            return False
        if isinstance(event, Failed):
            self._give_up(fetch, event.reason)
        else:
            fetch.deadline = time.monotonic() + FETCH_TIMEOUT_S
            if event.complete:
                self._complete(fetch, event)
        return True

    def on_refused(self, request_id: str, lease_id: str, reason: str) -> None:
        fetch = self._fetches.get(request_id)
        if fetch is not None and fetch.lease_id == lease_id:
            self._give_up(fetch, reason)

    def abort(self, request_id: str) -> None:
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            self._end(fetch, 0)

    def expire(self, now: float) -> None:
        for fetch in list(self._fetches.values()):
            if now >= fetch.deadline:
                self._give_up(fetch, f"no block came for {FETCH_TIMEOUT_S:g} s")

    def holders(self) -> set[str]:
        """The incarnations that something is awaited from."""
        return {fetch.holder.incarnation for fetch in self._fetches.values()}

    def _complete(self, fetch: _Fetch, event: Progress) -> None:
        if event.arrival is not None and event.arrival.foreign_formats:
            self._give_up(fetch, "the wire changed the blocks' values")
        else:
            self._finish(fetch, event.blocks_received)

    def _finish(self, fetch: _Fetch, num_received: int) -> None:
        self._counters.add("prefix_blocks_fetched_total", num_received)
        self._counters.add("prefix_fetch_seconds_total", time.monotonic() - fetch.started)
        self._end(fetch, num_received)
        self._go_on(fetch.message)

    def _give_up(self, fetch: _Fetch, reason: str) -> None:
        self._counters.add("prefix_fetch_failures_total")
        log.warning(
            "the prefix of %s, held by %s, is computed here: %s",
            fetch.request_id,
            fetch.holder.worker_id,
            reason,
        )
        self._end(fetch, 0)
        self._go_on(fetch.message)

    def _end(self, fetch: _Fetch, num_received: int) -> None:
        """Close the lease; blocks that came go to the prefix cache, unless somebody still writes to them."""
        del self._fetches[fetch.request_id], self._by_lease[fetch.lease_id]
        if self._receiver.close_lease(fetch.lease_id):
            self._engine.keep_prefix(fetch.room, num_received)
        else:
            self._closing[fetch.lease_id] = fetch.room.table

    def _on_closed(self, lease_id: str) -> bool:
        table = self._closing.pop(lease_id, None)
        if table is not None:
            self._engine.blocks.free(table)
        return table is not None


class PrefixHolder:
    """The lending side: cached blocks are held while they are on their way."""

    def __init__(self, engine: Engine, sender: Sender, counters: Counters) -> None:
        self._counters = counters
        self._engine = engine
        self._sender = sender
        self._lent: dict[str, BlockTable] = {}

    def lend(self, message: Fetch) -> str:
        """Push what is here of the wanted blocks, be it none: the final piece tells that there is no more.

        Returns why not, or an empty string.
        """
        if message.lease_id in self._lent:
            self._counters.add("duplicate_messages_total")
            return ""
        try:
            self._sender.connect(message.receiver)
        except TransferError as error:
            return str(error)
        if self._sender.wire_dtype(message.receiver) != "auto":
            return "the wire between us quantizes"
        table = self._engine.blocks.hold(message.identities)
        self._lent[message.lease_id] = table
        self._counters.add("prefix_blocks_lent_total", len(table.block_ids))
        self._sender.push(
            message.receiver, message.lease_id, table.block_ids, message.first_block, final=True
        )
        return ""

    def on_event(self, event: SendEvent) -> bool:
        """Whether the event was about a lease of ours."""
        table = self._lent.get(event.lease_id)
        if table is None:
            return False
        if isinstance(event, (Completed, Failed)):
            del self._lent[event.lease_id]
            self._engine.blocks.free(table)
        return True
