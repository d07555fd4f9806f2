"""The publisher of KV events in vLLM's format: a PUB socket for the stream, a ROUTER for missed batches.

Its thread encodes and sends, so that the engine's thread only queues the events.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import zmq

from engine.kv.cache_events import CacheEvent
from messaging.wake import Wake
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import BlockIdentity
from protocol.kv_events import CacheFormat, KvEventsConfig, endpoint_at
from protocol.logs import RareLog
from protocol.roles import ROLES

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
CLOSE_TIMEOUT_S = 2.0
MAX_REQUEST_BYTES = 1024
"""Largest request for missed batches, and largest subscription; any client may send these."""


class KvPublisher:
    """A publisher of KV events, for any thread. Binds when constructed; raises `ConfigError` if it cannot."""

    def __init__(self, config: KvEventsConfig, topic: str, place: int, cache: CacheFormat) -> None:
        self._topic = (config.topic or topic).encode()
        self._place = place
        self._encoding = Encoding(config.encoding, cache)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = 0
        self._strangers = RareLog(log)
        self._waiting: deque[tuple[float, Sequence[CacheEvent]]] = deque()
        self._wake = Wake()
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, config.hwm, "endpoint", config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = self._bind(zmq.ROUTER, config.hwm, "replay_endpoint", config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> list[str]:
        sockets = [self._pub, self._replay]
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets if socket is not None]

    def publish(self, events: Sequence[CacheEvent]) -> None:
        self._waiting.append((time.time(), events))
        self._wake.set()

    def close(self) -> None:
        """Send the queued events, then end. Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._wake.close()

    def _bind(self, kind: int, hwm: int, field: str, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 500
        socket.sndhwm = hwm
        socket.maxmsgsize = MAX_REQUEST_BYTES
        address = endpoint_at(endpoint, self._place)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {field}: cannot bind {address}: {error}") from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll())
            self._wake.clear()
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
        self._context.destroy(linger=500)

    def _send(self, timestamp: float, events: Sequence[CacheEvent]) -> None:
        encoded = self._encoding.events(events)
        if encoded:
            number = self._num_sent.to_bytes(8, "big")
            payload = msgspec.msgpack.encode([timestamp, encoded, self._place])
            self._num_sent += 1
            self._sent.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches from the requested number on, then the end marker."""
        client, *request = replay.recv_multipart()
        if len(request) != 2 or len(request[1]) != 8:
            self._strangers.warning(
                "dropped a request for KV events: not an empty frame and a number of 8 bytes"
            )
            return
        for number, payload in self._sent:
            if number >= request[1]:
                replay.send_multipart((client, b"", self._topic, number, payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


class Encoding:
    """The conversion of our events to vLLM's.

    vLLM's events identify blocks by their tokens alone. So blocks of a tenant with a salt, and blocks that
    another worker computed in another format, are left out.
    """

    def __init__(self, name: str, cache: CacheFormat) -> None:
        self._as_map = name == "map"
        self._block_size = cache.block_size
        self._root = cache.root()

    def events(self, events: Sequence[CacheEvent]) -> list[object]:
        shown = [event for event in events if event.root in (b"", self._root)]
        fields = map(self._fields, _runs(shown))
        return [each if self._as_map else list(each.values()) for each in fields]

    def _fields(self, run: list[CacheEvent]) -> dict[str, object]:
        """Return the fields of one event for a run of events that follow one another, in vLLM's order: in the
        list form, consumers know them by their places.
        """
        first = run[0]
        if first.kind == "cleared":
            return {"type": "AllBlocksCleared"}
        hashes, medium = [_hash(event.identity) for event in run], first.medium.name
        if first.kind == "removed":
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if first.parent in (b"", self._root) else _hash(first.parent),
            "token_ids": [token for event in run for token in event.token_ids],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }


def _runs(events: Sequence[CacheEvent]) -> Iterator[list[CacheEvent]]:
    """Group events into runs; blocks with tokens share a run if each is the parent of the next."""
    for (_, _, has_parent), group in groupby(events, key=lambda e: (e.kind, e.medium, bool(e.parent))):
        run: list[CacheEvent] = []
        for event in group:
            if run and (event.kind == "cleared" or (has_parent and event.parent != run[-1].identity)):
                yield run
                run = []
            run.append(event)
        yield run


def _hash(identity: BlockIdentity) -> int:
    return int.from_bytes(identity[8:], "big")


def place_of(config: ServeConfig, worker_id: str) -> int:
    """Return a worker's index among all workers, counted role by role."""
    role, _, number = worker_id.rpartition("-")
    place = int(number) if number.isdigit() else 0
    for name, spec in ROLES.items():
        if name == role:
            break
        place += config.num_replicas(spec)
    return place


def open_publisher(config: ServeConfig, worker_id: str, cache: CacheFormat) -> KvPublisher | None:
    """Return a publisher, or None if the configuration names no other consumers of KV events."""
    if config.kv_events_config is None:
        return None
    topic = f"kv@{worker_id}@{config.model_name}"
    return KvPublisher(config.kv_events_config, topic, place_of(config, worker_id), cache)
