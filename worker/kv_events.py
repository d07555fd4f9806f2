"""Reports of the prefix cache's contents to the routers, and to other consumers if any.

A step's changes are sent after its tokens, on the same connection. Batches are numbered, so a receiver
detects a lost batch and requests it again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

from engine.kv.block_manager import BlockManager
from engine.kv.cache_events import CacheEvent
from protocol.codec import encode
from protocol.kv_events import MAX_BLOCKS_PER_BATCH, REPLAY_BATCHES, KvChange
from protocol.worker_to_router import KvEvents
from worker.kv_publisher import KvPublisher
from worker.link import RouterLink, RouterLinks
from worker.parts import WorkerParts

log = logging.getLogger(__name__)


class KvEventSender:
    """The sender of KV events, for the loop's thread. The first batch has the cache's whole content."""

    def __init__(
        self, parts: WorkerParts, blocks: BlockManager, links: RouterLinks, publisher: KvPublisher | None
    ) -> None:
        self._parts = parts
        self._blocks = blocks
        self._log = blocks.watch()
        self._links = links
        self._publisher = publisher
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)

    def send(self) -> None:
        """Send the changes since the last call."""
        events = self._log.take()
        if events:
            self._send_batches(events)
            if self._publisher is not None:
                self._publisher.publish(events)

    def replay(self, first: int, link: RouterLink) -> None:
        """Send a router the batches from `first` on again, or the whole cache if some are no longer kept."""
        if self._sent and first < self._sent[0][0]:
            log.warning("the router missed KV events that are not kept any more: it is told everything again")
            self._parts.counters.add("kv_events_restated_total")
            self._send_batches(self._blocks.contents())
            return
        for sequence, raw in self._sent:
            if sequence >= first:
                link.offer(raw)
                self._parts.counters.add("kv_events_replayed_total")

    def _send_batches(self, events: Sequence[CacheEvent]) -> None:
        parts = self._parts
        for changes in _batches(events):
            sequence = parts.num_kv_events
            message = KvEvents(**parts.ids, sequence=sequence, changes=changes)
            raw = encode(message)
            self._sent.append((sequence, raw))
            parts.num_kv_events = sequence + 1
            self._links.offer(raw)


def _batches(events: Sequence[CacheEvent]) -> Iterator[list[KvChange]]:
    for start in range(0, len(events), MAX_BLOCKS_PER_BATCH):
        runs = groupby(events[start : start + MAX_BLOCKS_PER_BATCH], key=lambda event: event[:2])
        found = ((key, b"".join([event.identity for event in run])) for key, run in runs)
        yield [KvChange(kind, medium, identities) for (kind, medium), identities in found]
