"""Takes the workers' KV events into the index, each once and in order, and asks for those that got lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from protocol.kv_events import IDENTITY_BYTES, CacheFormat, KvChange
from protocol.messages import KvEvents, ReplayKvEvents, WorkerState
from router.journal import LiveRequest
from router.kv_index import KvIndex, block_keys
from router.metrics import Metrics
from router.registry import Registry, Worker, WorkerKey

logger = logging.getLogger(__name__)

REPLAY_INTERVAL_S = 1.0
"""After which a replay that has not come is asked for once more."""

SWEEP_S = 0.002
"""Of each sweep of the registry's: an event loop hardly feels it."""


@dataclass(eq=False)
class _Source:
    """One incarnation of a worker. `announced` is how many batches its last heartbeat said it had sent."""

    slot: int
    cache: CacheFormat | None
    has_blocks: bool = False
    next: int = 0
    announced: int = 0
    asked_at: float = float("-inf")


class KvFeed:
    """Belongs to the event loop."""

    def __init__(
        self, registry: Registry, metrics: Metrics, send: Callable[[Worker, msgspec.Struct], bool]
    ) -> None:
        self.index: KvIndex[WorkerKey] = KvIndex()
        self._registry = registry
        self._metrics = metrics
        self._send = send
        self._sources: dict[WorkerKey, _Source] = {}
        self.formats: Collection[CacheFormat] = ()
        """How the workers identify blocks: mostly there is one."""

    def cached_tokens(self, request: LiveRequest) -> dict[str, int]:
        """How many leading tokens of a request each worker has in its pool, by their ids."""
        found: dict[str, int] = {}
        for cache in self.formats:
            for key, num_blocks in self.index.find(request.block_keys(cache)).items():
                if self._registry.current(*key) is not None:
                    found[key.worker_id] = num_blocks * cache.block_size
        return found

    # --- events -------------------------------------------------------------------------------------

    def take(self, message: KvEvents) -> None:
        """Those that are not from a current incarnation, came before, or come too early, are dropped."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        if worker is None:
            self._metrics.kv_events_dropped("unknown_worker")
            return
        source = self._source(worker)
        if message.changes and message.changes[0].kind == "cleared":
            source.next = message.sequence
        if message.sequence < source.next:
            self._metrics.kv_events_dropped("duplicate")
        elif message.sequence > source.next:
            self._metrics.kv_events_dropped("gap")
            self._ask(worker, source)
        else:
            source.next += 1
            for change in message.changes:
                self._apply(worker.key, source, change)

    def check(self, state: WorkerState) -> None:
        """A heartbeat may overtake the events that it counts, but not by a whole interval."""
        worker = self._registry.current(state.worker_id, state.incarnation)
        if worker is None:
            return
        source = self._source(worker)
        if source.next < source.announced:
            self._ask(worker, source)
        source.announced = state.num_kv_events

    def sweep(self) -> None:
        """Forget what is known of workers that are gone, a little at a time."""
        gone = [key for key in self._sources if self._registry.current(*key) is None]
        for key in gone:
            self.index.remove(self._sources.pop(key).slot)
        if gone:
            self._collect_formats()
        self.index.sweep(SWEEP_S)

    def _source(self, worker: Worker) -> _Source:
        source = self._sources.get(worker.key)
        if source is None:
            source = self._sources[worker.key] = _Source(self.index.add(worker.key), worker.cache)
            self._collect_formats()
        return source

    def _collect_formats(self) -> None:
        caches = (source.cache for source in self._sources.values())
        self.formats = {cache for cache in caches if cache is not None}

    def _apply(self, key: WorkerKey, source: _Source, change: KvChange) -> None:
        if len(change.identities) % IDENTITY_BYTES:
            self._metrics.kv_events_dropped("malformed")
        elif change.kind == "cleared":
            if source.has_blocks:
                self.index.remove(source.slot)
                source.slot, source.has_blocks = self.index.add(key), False
        elif change.kind == "stored":
            source.has_blocks = True
            self.index.store(source.slot, change.medium, block_keys(change.identities))
        else:
            self.index.evict(source.slot, change.medium, block_keys(change.identities))

    def _ask(self, worker: Worker, source: _Source) -> None:
        now = time.monotonic()
        if now - source.asked_at < REPLAY_INTERVAL_S:
            return
        source.asked_at = now
        self._metrics.kv_event_gaps.inc()
        logger.warning(
            "worker %s: KV events from number %d on are missing", worker.key.worker_id, source.next
        )
        self._send(worker, ReplayKvEvents(incarnation=worker.key.incarnation, first=source.next))
