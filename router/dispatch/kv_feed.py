"""The workers' KV events, applied to the index each once and in order; lost events are requested again."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from protocol.kv_events import IDENTITY_BYTES, CacheFormat, KvChange, Medium
from protocol.router_to_worker import ReplayKvEvents
from protocol.worker_to_router import KvEvents, WorkerState
from router.dispatch import Core
from router.requests.journal import LiveRequest
from router.workers.kv_index import KvIndex, block_keys
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""[seconds] Delay after which events that a heartbeat on another connection announced count as lost."""

REPLAY_INTERVAL_S = 1.0
"""Time after which a missing replay is requested again."""

SWEEP_S = 0.002
"""Duration of one sweep, short enough not to delay the event loop."""


@dataclass(eq=False)
class _Source:
    """One incarnation of a worker. Since `announced_at` a heartbeat's `announced` batches are awaited."""

    worker: Worker
    slot: int
    has_blocks: bool = False
    next: int = 0
    announced: int = 0
    announced_at: float = 0.0
    asked_at: float = float("-inf")


class KvFeed:
    """The index of workers' KV blocks and its updates. Runs on the event loop only."""

    def __init__(self, core: Core) -> None:
        _, _, self._registry, self._metrics, self._send = core
        self.index: KvIndex[str] = KvIndex()
        """Index of each worker's blocks, by worker id."""
        self._sources: dict[str, _Source] = {}
        self.formats: Collection[CacheFormat] = ()
        """Formats of the workers' block identities; usually one."""

    def cached_tokens(self, request: LiveRequest) -> dict[str, int]:
        """Return the number of leading tokens of a request that each worker has in its pool, by worker id."""
        found: dict[str, int] = {}
        for cache in self.formats:
            found |= self.index.cached_tokens(request.block_keys(cache), len(request.token_ids), cache)
        return found

    def register(self, worker: Worker) -> None:
        """Track a worker that has registered, perhaps again. A new incarnation starts without blocks."""
        known = self._sources.get(worker.key.worker_id)
        if known is not None and known.worker is worker:
            return
        if known is not None:
            self._forget(known)
        worker_id = worker.key.worker_id
        self._sources[worker_id] = _Source(worker, self.index.add_holder(worker_id))
        self._collect_formats()

    def receive(self, message: KvEvents) -> None:
        """Apply events of the current incarnation that come next in order; drop the others."""
        source = self._source(message.worker_id, message.incarnation)
        if source is None:
            self._metrics.count("kv_events_dropped_total", "unknown_worker")
            return
        if message.changes and message.changes[0].kind == "cleared":
            source.next = message.sequence
        if message.sequence < source.next:
            self._metrics.count("kv_events_dropped_total", "duplicate")
        elif message.sequence > source.next:
            self._metrics.count("kv_events_dropped_total", "gap")
            self._ask(source)
        else:
            source.next += 1
            for change in message.changes:
                self._apply(source, change)

    def check(self, state: WorkerState, now: float) -> None:
        """Check for lost events. Heartbeats may overtake the events that they count, or be read late."""
        source = self._source(state.worker_id, state.incarnation)
        if source is None:
            return
        if source.next >= source.announced:
            source.announced, source.announced_at = state.num_kv_events, now
        elif now > source.announced_at + LATE_S:
            self._ask(source)

    def sweep(self) -> None:
        """Remove blocks of workers that are gone from the index, some at each call."""
        for source in list(self._sources.values()):
            if self._registry.current(*source.worker.key) is not source.worker:
                self._forget(source)
        self.index.sweep(SWEEP_S)

    def _source(self, worker_id: str, incarnation: str) -> _Source | None:
        source = self._sources.get(worker_id)
        if source is None or source.worker.key.incarnation != incarnation:
            return None
        return source

    def _forget(self, source: _Source) -> None:
        self.index.remove_holder(source.slot)
        del self._sources[source.worker.key.worker_id]
        self._collect_formats()

    def _collect_formats(self) -> None:
        caches = (source.worker.cache for source in self._sources.values())
        self.formats = {cache for cache in caches if cache is not None}

    def _apply(self, source: _Source, change: KvChange) -> None:
        if len(change.identities) % IDENTITY_BYTES:
            self._metrics.count("kv_events_dropped_total", "malformed")
        elif change.kind == "cleared":
            if source.has_blocks:
                self.index.remove_holder(source.slot)
                source.slot = self.index.add_holder(source.worker.key.worker_id)
                source.has_blocks = False
        elif change.medium is not Medium.GPU:
            pass  # placement counts only what lies in the pool
        elif change.kind == "stored":
            source.has_blocks = True
            self.index.store(source.slot, block_keys(change.identities))
        else:
            self.index.evict(source.slot, block_keys(change.identities))

    def _ask(self, source: _Source) -> None:
        worker, now = source.worker, time.monotonic()
        if now - source.asked_at < REPLAY_INTERVAL_S:
            return
        source.asked_at = now
        self._metrics.count("kv_event_gaps_total")
        missing = "worker %s: KV events from number %d on are missing"
        logger.warning(missing, worker.key.worker_id, source.next)
        self._send(worker, ReplayKvEvents(incarnation=worker.key.incarnation, first=source.next))
