"""KV events as other routers consume them: plain msgpack, without our hashes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from engine.engine import Engine
from engine.kv.prefix_cache import find_room
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.kv_events import KvEventsConfig
from tests.engine.listener import really_held
from tests.fuzzing import fuzz
from tests.worker.harness import request
from tests.worker.light_loop import small_engine
from tests.worker.tiny_model import VOCAB_SIZE
from worker.kv_publisher import END_OF_REPLAY, MAX_REQUEST_BYTES, KvPublisher, open_publisher, place_of

TOPIC = "kv@decode-1@model"
FREE = "tcp://127.0.0.1:0"
WAIT_MS = 10_000
FIELDS = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]


class Consumer:
    """Follows one worker as other routers do. `held` has hashes by medium."""

    def __init__(self, publisher: KvPublisher) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.sub, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.dealer.connect(publisher.endpoints[1])
        self.next = 2**62
        self.replay()  # returns nothing, once everything published before is sent
        self.sub.subscribe("kv@")
        self.sub.connect(publisher.endpoints[0])
        self.next = 0
        self.held: set[tuple[str, int]] = set()
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """For each block that came with tokens: its parent's hash, and its own tokens."""
        self.is_lost = False

    def follow(self, end: int) -> None:
        """Take the batches before `end`. Missed ones are replayed; after too many, all is dropped."""
        while self.next < end:
            assert self.sub.poll(WAIT_MS)
            topic, number, payload = self.sub.recv_multipart()
            assert topic == TOPIC.encode()
            sequence = int.from_bytes(number, "big")
            if sequence > self.next:
                self.replay()
            if sequence >= self.next:
                self.take(sequence, payload)

    def replay(self) -> None:
        self.dealer.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self.dealer.poll(WAIT_MS)
            empty, topic, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence == -1:
                assert topic == payload == b""
                return
            assert topic == TOPIC.encode()
            if sequence > self.next:
                self.held.clear()
                self.is_lost = True
            self.take(sequence, payload)

    def take(self, sequence: int, payload: bytes) -> None:
        self.next = sequence + 1
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert timestamp > 1e9 and rank == 1
        for event in events:
            self.apply(event)

    def apply(self, event: list[Any] | dict[str, Any]) -> None:
        if isinstance(event, dict):
            assert event.pop("type") == "BlockStored" or len(event) < len(FIELDS)
            fields = event
        else:
            kind, *values = event
            names = FIELDS if kind == "BlockStored" else ["block_hashes", "medium"]
            fields = dict(zip(names, values, strict=kind != "AllBlocksCleared"))
        if not fields:
            self.held.clear()
            return
        blocks = {(fields["medium"], value) for value in fields["block_hashes"]}
        if "token_ids" not in fields:
            self.held -= blocks
            return
        self.held |= blocks
        assert list(fields) == FIELDS
        parent, size = fields["parent_block_hash"], fields["block_size"]
        for index, value in enumerate(fields["block_hashes"] if fields["token_ids"] else ()):
            self.tokens[value] = parent, tuple(fields["token_ids"][index * size :][:size])
            parent = value

    def prefix(self, value: int) -> list[int]:
        """Return all tokens up to the end of a block."""
        parent, tokens = self.tokens[value]
        return [*(self.prefix(parent) if parent is not None else []), *tokens]

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    engine = small_engine(model_folder, 20, kv_offloading_size=16 * 8192 / 2**30)
    yield engine
    engine.close()


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def publisher_of(engine: Engine, closing: contextlib.ExitStack, **options: Any) -> KvPublisher:
    config = KvEventsConfig(endpoint=FREE, replay_endpoint=FREE, **options)
    return closing.enter_context(contextlib.closing(KvPublisher(config, TOPIC, 1, engine.cache_format)))


def consumer_of(publisher: KvPublisher, closing: contextlib.ExitStack) -> Consumer:
    return closing.enter_context(contextlib.closing(Consumer(publisher)))


def hashes(engine: Engine) -> set[tuple[str, int]]:
    held = really_held(engine.blocks)
    return {(medium.name, int.from_bytes(identity[-8:], "big")) for medium, identity in held}


@pytest.mark.parametrize(("encoding", "kept"), [("array", 10_000), ("map", 10_000), ("array", 2)])
def test_a_consumer_knows_the_held_blocks(
    engine: Engine, closing: contextlib.ExitStack, encoding: str, kept: int
) -> None:
    """It joins late and replays what it missed. Beyond the kept events it starts from nothing."""
    log = engine.blocks.watch()
    publisher = publisher_of(engine, closing, encoding=encoding, buffer_steps=kept)
    rng = random.Random(kept)
    num_published = 0

    def serve() -> list[int]:
        nonlocal num_published
        prompt = rng.choices(range(1, VOCAB_SIZE), k=100)
        engine.add(request("r", prompt, max_tokens=4))
        while engine.has_work():
            engine.step()
            if events := log.take():
                publisher.publish(events)
                num_published += 1
        return prompt

    for _ in range(3):
        serve()
    consumer = consumer_of(publisher, closing)
    while not consumer.sub.poll(20):
        serve()
    consumer.follow(num_published)
    for _ in range(5):
        newest = serve()
        consumer.follow(num_published)
    assert consumer.is_lost == (kept == 2)
    if consumer.is_lost:
        assert consumer.held <= hashes(engine)
    else:
        assert consumer.held == hashes(engine)
        assert {medium for medium, _ in consumer.held} == {"GPU", "CPU"}
        assert newest[:96] in [
            consumer.prefix(value) for _, value in consumer.held if value in consumer.tokens
        ]


def test_the_bytes_follow_the_format(engine: Engine, closing: contextlib.ExitStack) -> None:
    """Blocks of tenants and of other formats are left out, since consumers could not tell them apart."""
    log = engine.blocks.watch()
    log.take()
    for salt, token in (("", 300), ("tenant", 300), ("", 400)):
        root = engine.cache_format.root(salt)
        room = find_room(engine.blocks, list(range(token, token + 48)), root)
        assert room is not None
        room.keep(2)
    events = [event for event in log.take() if event.kind == "stored" and event.token_ids]
    assert len(events) == 6
    publisher = publisher_of(engine, closing)
    publisher.publish(events)
    consumer = consumer_of(publisher, closing)
    consumer.dealer.send_multipart((b"", bytes(8)))
    assert consumer.dealer.poll(WAIT_MS)
    payload = consumer.dealer.recv_multipart()[3]
    hashes = [int.from_bytes(event.identity[-8:], "big") for event in events]
    expected = [
        ["BlockStored", two, None, list(range(token, token + 32)), 16, None, "GPU", None]
        for two, token in ((hashes[:2], 300), (hashes[4:], 400))
    ]
    assert msgspec.msgpack.decode(payload)[1:] == [expected, 1]


def test_each_worker_has_its_own_port() -> None:
    config = ServeConfig(prefill_replicas=3, decode_replicas=2)
    workers = ["prefill-0", "prefill-2", "decode-0", "decode-1"]
    assert [place_of(config, name) for name in workers] == [0, 2, 3, 4]
    cache: Any = None
    assert open_publisher(config, "decode-0", cache) is None


def test_a_port_that_is_taken_is_named(engine: Engine, closing: contextlib.ExitStack) -> None:
    taken = publisher_of(engine, closing).endpoints[0]
    before, port = taken.rsplit(":", 1)
    config = KvEventsConfig(endpoint=f"{before}:{int(port) - 1}")
    with pytest.raises(ConfigError, match=f"--kv-events-config: endpoint: cannot bind {taken}"):
        KvPublisher(config, TOPIC, 1, engine.cache_format)


def test_fuzz_the_replay_port(engine: Engine, closing: contextlib.ExitStack) -> None:
    """It is open to anyone: a too large message ends its connection, an invalid one is dropped."""
    publisher = publisher_of(engine, closing)
    consumer = consumer_of(publisher, closing)
    large = consumer.context.socket(zmq.DEALER)
    large.linger = 0
    ended = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    large.connect(publisher.endpoints[1])
    large.send(b"x" * (MAX_REQUEST_BYTES + 1))
    assert ended.poll(WAIT_MS)
    large.disable_monitor()
    large.close()

    fit = 0

    def check(frames: list[bytes]) -> None:
        nonlocal fit
        consumer.dealer.send_multipart(frames)
        if len(frames) == 2 and len(frames[1]) == 8:
            fit += 1
            assert consumer.dealer.poll(WAIT_MS)
            assert consumer.dealer.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]

    frame = st.binary(max_size=20) | st.binary(min_size=7, max_size=9) | st.just(b"")
    fuzz(check, st.lists(frame, min_size=1, max_size=4), examples=100)
    assert fit
    log = engine.blocks.watch()
    engine.add(request("r", [5] * 40, max_tokens=1))
    while engine.has_work():
        engine.step()
    publisher.publish(log.take())
    consumer.follow(1)
    consumer.next = 0
    consumer.replay()
    assert consumer.next == 1, "an answer that nobody should have got came first"
