"""A worker's prefix cache and the router's index of it, with real sockets in between."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import worker.kv_events
from engine.engine import Engine
from messaging.sockets import ClusterKeys, bind_router, start_authenticator
from protocol.codec import encode, worker_to_router
from protocol.config import ServeConfig
from protocol.ids import PeerAddress
from protocol.kv_events import MAX_BLOCKS_PER_BATCH, Medium
from protocol.outputs import TokenOutput
from protocol.roles import ROLES
from protocol.router_to_worker import ReplayKvEvents
from protocol.worker_to_router import KvEvents, Register, StepOutput
from router.dispatch import Core
from router.dispatch.kv_feed import LATE_S, KvFeed
from router.observe.metrics import Metrics
from router.requests.journal import Journal
from router.workers.kv_index import block_keys
from router.workers.registry import Registry
from tests.engine.listener import really_held
from tests.worker.harness import request, tiny_config
from tests.worker.light_loop import BLOCK_BYTES
from tests.worker.tiny_model import VOCAB_SIZE
from worker.kv_events import KvEventSender
from worker.link import RouterLinks
from worker.parts import WorkerParts

POOL, HOST = 24, 16
GIB = 2**30
WAIT_MS = 20_000


class Wire:
    """A worker's events on their way to the router's feed. Some batches are lost, some come twice."""

    def __init__(self, engine: Engine) -> None:
        self.keys = ClusterKeys.generate()
        self.context: zmq.Context[Any] = zmq.Context()
        self._authenticator = start_authenticator(self.context, self.keys)
        self._socket, self.endpoint = bind_router(self.context, self.keys, "127.0.0.1")
        self.registry = Registry(60.0)
        self.metrics = Metrics("m", self.registry)
        self.feed = KvFeed(
            Core(ServeConfig(), Journal("r"), self.registry, self.metrics, self._send_to_worker)
        )
        self.registry.on_registered = self.feed.register
        self.engine = engine
        self.lose: Callable[[KvEvents], bool] = lambda message: False
        self.twice = False
        self.start("first")

    def start(self, incarnation: str) -> None:
        """Start the worker's process, with the engine's present blocks."""
        self.parts = WorkerParts(
            config=self.engine.config,
            role=ROLES["decode"],
            worker_id="w",
            incarnation=incarnation,
            host="127.0.0.1",
            keys=self.keys,
            context=self.context,
            engine=self.engine,
        )
        self.links = RouterLinks(self.parts, [self.endpoint])
        (self.link,) = self.links
        register = Register(
            address=PeerAddress(worker_id="w", incarnation=incarnation, control="tcp://x:1"),
            role="decode",
            model="m",
            max_model_len=1,
            vocab_size=1,
            eos_token_ids=[],
            state=self.parts.state(),
            cache=self.engine.cache_format,
        )
        self.registry.register(register)
        self.sender = KvEventSender(self.parts, self.engine.blocks, self.links, None)

    def _send_to_worker(self, worker: object, message: msgspec.Struct) -> bool:
        self._socket.send_multipart([b"w", encode(message)])
        return True

    def deliver(self) -> None:
        """Deliver all that the worker has sent so far."""
        self.links.send_outputs([TokenOutput(request_id="end", token_ids=[])])
        while True:
            assert self._socket.poll(WAIT_MS)
            message = worker_to_router.decode(self._socket.recv_multipart()[1])
            if isinstance(message, StepOutput):
                return
            assert isinstance(message, KvEvents)
            if not self.lose(message):
                for _ in range(1 + self.twice):
                    self.feed.receive(message)

    def replay(self) -> None:
        """Replay the events that the router asked for."""
        assert self.link.socket.poll(WAIT_MS)
        for message in self.link.receive():
            assert isinstance(message, ReplayKvEvents)
            self.sender.replay(message.first, self.link)

    def run(self, *prompts: list[int]) -> None:
        """Serve the prompts, telling the router after each step."""
        for index, prompt in enumerate(prompts):
            self.engine.add(request(f"r{index}", prompt, max_tokens=4))
        while self.engine.has_work():
            self.engine.step()
            self.sender.send()

    def told(self) -> set[int]:
        """Return the index's entries for the worker."""
        (source,) = self.feed._sources.values()
        return {
            key
            for shard in self.feed.index._shards
            for key, holders in shard.items()
            if holders >> source.slot & 1
        }

    def truth(self) -> set[int]:
        """Return the blocks in the engine's pool, which alone are indexed."""
        held = really_held(self.engine.blocks)
        return {block_keys(identity)[0] for medium, identity in held if medium is Medium.GPU}

    def counted(self, name: str, **labels: str) -> float:
        labels["model_name"] = "m"
        return self.metrics.registry.get_sample_value(f"tandem_{name}", labels) or 0.0

    def close(self) -> None:
        self._authenticator.stop()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Make an engine with a host tier and a disk tier below its pool."""
    config = tiny_config(
        model_folder,
        max_model_len=256,
        kv_cache_memory_bytes=POOL * BLOCK_BYTES,
        kv_offloading_size=HOST * BLOCK_BYTES / GIB,
        kv_disk_path=str(tmp_path_factory.mktemp("disk")),
        kv_disk_size=40 * BLOCK_BYTES / GIB,
    )
    engine = Engine(config)
    yield engine
    engine.close()


@pytest.fixture
def wire(engine: Engine) -> Iterator[Wire]:
    wire = Wire(engine)
    yield wire
    wire.close()


_seeds = itertools.count()


def prompts(count: int) -> list[list[int]]:
    """Return new prompts, some with a common beginning."""
    rng = random.Random(next(_seeds))
    shared = rng.choices(range(1, VOCAB_SIZE), k=40)
    return [
        shared * rng.randrange(2) + rng.choices(range(1, VOCAB_SIZE), k=rng.randrange(20, 150))
        for _ in range(count)
    ]


def test_the_index_equals_the_block_manager(wire: Wire) -> None:
    """After many evictions to the host, to the disk and out of all tiers. Batches sent twice count once."""
    for wire.twice in (False, True):
        for prompt in prompts(12):
            wire.run(prompt, prompt[:50])
            wire.deliver()
            assert wire.told() == wire.truth()
    assert {medium for medium, _ in really_held(wire.engine.blocks)} == set(Medium)
    assert wire.counted("kv_events_dropped_total", reason="duplicate") > 0
    assert wire.counted("kv_event_gaps_total") == 0


@pytest.mark.parametrize("kept", [1000, 3])
def test_lost_batches_are_sent_again(wire: Wire, kept: int) -> None:
    """All blocks are sent if the gap is older than the kept events. Batches sent meanwhile do no harm."""
    wire.sender._sent = deque(maxlen=kept)
    wire.run(*prompts(2))
    wire.deliver()
    first, wire.lose = wire.parts.num_kv_events, lambda message: True
    for prompt in prompts(5):
        wire.run(prompt)
    wire.deliver()
    assert wire.parts.num_kv_events > first + 5
    wire.lose = lambda message: False
    wire.run(*prompts(1))
    wire.deliver()
    assert wire.told() != wire.truth()
    wire.run(*prompts(1))  # sent before the worker hears of the gap
    wire.replay()
    wire.run(*prompts(1))
    wire.deliver()
    assert wire.told() == wire.truth()
    counters = wire.parts.counters
    assert (counters["kv_events_replayed_total"] > 0) == (kept == 1000)
    assert counters["kv_events_restated_total"] == (kept == 3)
    assert wire.counted("kv_event_gaps_total") == 1


def test_a_lost_last_batch_is_noticed(wire: Wire) -> None:
    wire.run(*prompts(1))
    wire.deliver()
    wire.lose = lambda message: True
    wire.run(*prompts(1))
    wire.deliver()
    wire.lose = lambda message: False
    for now in (0, 2 * LATE_S):
        wire.feed.check(wire.parts.state(), now)
    wire.replay()
    wire.deliver()
    assert wire.told() == wire.truth()


def test_a_restart_begins_with_an_empty_index(wire: Wire) -> None:
    """With another incarnation, or with the same one, which only the batch numbers reveal."""
    wire.run(*prompts(3))
    wire.deliver()
    for incarnation in ("second", "second"):
        wire.lose = lambda message: True
        wire.run(*prompts(3))
        wire.deliver()
        wire.lose = lambda message: False
        wire.links.close()
        wire.start(incarnation)
        wire.run(*prompts(1))
        wire.deliver()
        wire.feed.sweep()
        assert wire.told() == wire.truth()
    assert wire.counted("kv_event_gaps_total") == 0


def test_large_states_are_sent_in_several_batches(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.run(*prompts(5))
    assert MAX_BLOCKS_PER_BATCH > 5
    monkeypatch.setattr(worker.kv_events, "MAX_BLOCKS_PER_BATCH", 5)
    wire.start("second")
    wire.sender.send()
    assert wire.parts.num_kv_events > 5
    wire.deliver()
    wire.feed.sweep()
    assert wire.told() == wire.truth()
