"""Blocks move through Ray's object store, between actors of a real Ray."""

from __future__ import annotations

import gc
import random
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from bench.transfer.object_store import running_ray, start_actor
from deploy.config import load_config
from deploy.ray_cluster import _STORE_BYTES_PER_PAIR, object_store_bytes
from kvtransfer.blocks.extents import PART_BYTES
from kvtransfer.interface import Completed, Failed, Progress, TransferError
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, Channel
from kvtransfer.transports.object_store import (
    Inbox,
    Inboxes,
    ObjectReader,
    ObjectStoreTransport,
    aligned,
    copy,
)
from kvtransfer.transports.registry import open_transports
from kvtransfer.transports.transport import MAX_IN_FLIGHT
from messaging.wake import Wake
from protocol.config import ServeConfig
from protocol.errors import ProtocolError
from protocol.ids import PeerAddress
from tests.kvtransfer.ray_ends import RemoteSide, Side, wait_stored
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, block, make_pool
from tests.tiers.seeds import seeds

Make = Callable[..., RemoteSide]
NUM_BLOCKS, BLOCK_BYTES = 32, 1024 * 1024
EVERYTHING = list(range(NUM_BLOCKS))
PROMPT_S = 20.0
LEASES = 14


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    """Keep a list of idle actors, which take seconds to start."""
    with running_ray():
        yield [start_actor(Side, "side") for _ in range(2)]


@pytest.fixture
def make(actors: list[Any]) -> Iterator[Make]:
    """Start sides in idle actors, and close them after the test."""
    sides: list[RemoteSide] = []

    def start(
        role: str, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES, **options: Any
    ) -> RemoteSide:
        actor = actors.pop() if actors else start_actor(Side, "side")
        sides.append(RemoteSide(actor, role, num_blocks, block_bytes, seed=1 + len(sides), **options))
        return sides[-1]

    yield start
    for side in sides:
        if side.is_alive:
            side.close()
            actors.append(side.actor)
    wait_stored(lambda stored: stored == 0)


# --- functions that run in the sides ------------------------------------------------------------------


def open_lease(end: ReceiverEnd, lease_id: str, blocks: list[int]) -> None:
    end.open(lease_id, blocks)


def close_lease(end: ReceiverEnd, lease_id: str) -> bool:
    return end.receiver.close_lease(lease_id)


def wait_lease(end: Any, lease_id: str, timeout_s: float = 20.0) -> Any:
    return end.wait_lease(lease_id, timeout_s)


def push(
    end: SenderEnd, peer: PeerAddress, lease_id: str, blocks: list[int], first: int, final: bool
) -> None:
    end.push(peer, lease_id, blocks, first, final=final)


def push_all(end: SenderEnd, peer: PeerAddress, lease_id: str, blocks: list[int]) -> Any:
    end.push(peer, lease_id, blocks)
    return end.wait_lease(lease_id)


def push_without_end(end: SenderEnd, peer: PeerAddress, lease_id: str, blocks: list[int]) -> None:
    """Push far more than fits in flight, without waiting."""
    for _ in range(40):
        end.push(peer, lease_id, blocks, final=False)
    end.wait_for(lambda event: True)


def blocks_of(end: Any, indices: list[int]) -> list[bytes]:
    return [block(end.pool, index) for index in indices]


def counters(end: Any) -> dict[str, float]:
    return end.end.counters()


def sockets(end: Any) -> int:
    """Return the listening sockets, ends of socket pairs, and the few that Ray has within its node."""
    gc.collect()
    connections = psutil.Process().net_connections("all")
    return sum(each.family == socket.AF_UNIX or each.status == psutil.CONN_LISTEN for each in connections)


def begin(sender: RemoteSide, receiver: RemoteSide) -> None:
    """Open a lease of all blocks, and leave the sender pushing to it."""
    receiver.apply(open_lease, "lease", EVERYTHING)
    sender.apply(push_without_end, receiver.peer, "lease", EVERYTHING)


# --- tests --------------------------------------------------------------------------------------------


def test_it_is_used_only_when_named() -> None:
    assert "object_store" not in ServeConfig().transport_names
    assert "object_store" in load_config({"kv_transports": "tcp,object_store"}, {}).transport_names


def test_outside_of_an_actor_it_is_left_out() -> None:
    with pytest.raises(TransferError, match="no Ray actor"):
        open_transports(["object_store"], make_pool(), "name")
    wires = open_transports(["object_store", "tcp"], make_pool(), "name")
    assert [wire.name for wire in wires] == ["tcp"]


def test_the_store_has_room_for_all_blocks_in_flight() -> None:
    assert _STORE_BYTES_PER_PAIR == (MAX_IN_FLIGHT + 1) * PART_BYTES
    least = object_store_bytes(ServeConfig(decode_replicas=8))
    three = ServeConfig(kv_transports="object_store", prefill_replicas=1, decode_replicas=2)
    assert object_store_bytes(three) == least + 6 * _STORE_BYTES_PER_PAIR


@pytest.mark.parametrize("seed", seeds(20))
def test_differently_cut_buffers_are_paired(seed: int) -> None:
    rng = random.Random(seed)
    nbytes = rng.randrange(1, 2000)
    source, target = rng.randbytes(nbytes), bytearray(nbytes)

    def cut(buffer: bytes | bytearray) -> list[memoryview]:
        ends = [*sorted(rng.sample(range(nbytes), min(nbytes, rng.randrange(9)))), nbytes]
        return [memoryview(buffer)[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    for ours, theirs in aligned(cut(source), cut(target)):
        theirs[:] = ours
    assert target == source


def test_an_inbox_returns_references_in_order() -> None:
    inbox = Inbox()
    inbox.put(1, "second")
    assert inbox.take(0) is None
    inbox.put(0, "first")
    assert [inbox.take(0), inbox.take(0), inbox.take(0)] == ["first", "second", None]
    inbox.put(0, "too late")
    inbox.put(2 + MAX_IN_FLIGHT + 1, "more than may be on its way")
    assert not inbox._arrived
    inbox.put(2, "skipped")
    inbox.skip()
    inbox.put(3, "next")
    assert inbox.take(0) == "next" and not inbox._arrived


@pytest.mark.parametrize("nbytes", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_an_object_of_another_size_than_its_piece_is_refused(nbytes: int) -> None:
    ours, theirs = socket.socketpair()
    wake, pool = Wake(), make_pool(4, BLOCK_BYTES, 1)
    before = bytes(pool.buffer)
    carrier = SimpleNamespace(inboxes=Inboxes(), get=lambda reference, timeout_s: [memoryview(reference)])
    reader = ObjectReader(carrier, Channel(ours, wake, PROMPT_S), pool)
    theirs.send(GOOD)
    carrier.inboxes.put(reader.inbox.inbox_id, 0, bytes(nbytes))
    with pytest.raises(ProtocolError, match="another size"):
        reader.read(np.array([0]), np.array([2]), WriteGate())
    assert pool.buffer == before
    reader.close()
    ours.close(), theirs.close(), wake.close()


def test_a_closed_gate_admits_nothing() -> None:
    gate, target = WriteGate(), bytearray(4)
    assert copy(memoryview(b"abcd"), memoryview(target), gate) and target == b"abcd"
    gate.close()
    assert not copy(memoryview(b"efgh"), memoryview(target), gate) and target == b"abcd"


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(200, 48), (3000, 4096), (3, 20_000_001)])
def test_blocks_arrive_bit_by_bit(make: Make, num_blocks: int, block_bytes: int) -> None:
    rng = random.Random(num_blocks)
    sender = make("sender", num_blocks, block_bytes)
    receiver = make("receiver", num_blocks, block_bytes)
    count = num_blocks - 1
    sources, targets = rng.sample(range(num_blocks), count), rng.sample(range(num_blocks), count)
    sources[: count // 2] = sorted(sources[: count // 2])
    (untouched,) = set(range(num_blocks)) - set(targets)
    before = receiver.apply(blocks_of, [untouched])
    receiver.apply(open_lease, "lease", targets)
    half = count // 3
    sender.apply(push, receiver.peer, "lease", sources[:half], 0, False)
    sender.apply(push, receiver.peer, "lease", sources[half:], half, False)
    sender.apply(push, receiver.peer, "lease", [], count, True)
    completed = sender.apply(wait_lease, "lease")
    assert isinstance(completed, Completed)
    assert (completed.transport, completed.nbytes) == ("object_store", count * block_bytes)
    assert receiver.apply(wait_lease, "lease") == Progress("lease", count, complete=True)
    assert receiver.apply(blocks_of, targets) == sender.apply(blocks_of, sources)
    assert receiver.apply(blocks_of, [untouched]) == before
    wait_stored(lambda stored: stored == 0)


def test_many_leases_over_one_pair_and_back_again(make: Make) -> None:
    """It moves more than the store holds, over lasting connections."""
    sender, receiver = make("sender"), make("receiver")
    for number in range(LEASES):
        receiver.apply(open_lease, f"lease-{number}", EVERYTHING)
        assert isinstance(sender.apply(push_all, receiver.peer, f"lease-{number}", EVERYTHING), Completed)
        assert receiver.apply(close_lease, f"lease-{number}")
    moved = LEASES * NUM_BLOCKS * BLOCK_BYTES
    assert 2 * object_store_bytes(ServeConfig(kv_transports="object_store")) < moved
    assert receiver.apply(blocks_of, EVERYTHING) == sender.apply(blocks_of, EVERYTHING)
    assert sender.apply(counters)["connections_made"] == 1


def test_a_killed_receiver_fails_the_lease_and_its_successor_works(make: Make) -> None:
    sender, receiver = make("sender"), make("receiver")
    begin(sender, receiver)
    receiver.kill()
    failed = sender.apply(wait_lease, "lease", PROMPT_S)
    assert isinstance(failed, Failed) and failed.reason.startswith("object_store: ")
    wait_stored(lambda stored: stored == 0)

    late = sender.apply(push_all, receiver.peer, "late", [0])
    assert isinstance(late, Failed)
    successor = make("receiver")
    successor.apply(open_lease, "lease", EVERYTHING)
    assert isinstance(sender.apply(push_all, successor.peer, "lease", EVERYTHING), Completed)
    assert successor.apply(blocks_of, EVERYTHING) == sender.apply(blocks_of, EVERYTHING)


def test_a_sender_that_closes_midway_leaves_no_object(make: Make) -> None:
    """Both processes live on, and the objects between them are freed."""
    sender, receiver = make("sender"), make("receiver")
    begin(sender, receiver)
    assert sender.close() == []
    wait_stored(lambda stored: stored == 0)
    sender.start()
    receiver.apply(open_lease, "next", [])
    assert isinstance(sender.apply(push_all, receiver.peer, "next", []), Completed)


def rename_carrier(end: ReceiverEnd, address: str) -> str:
    """Change the carrier's address. Return the old one."""
    (wire,) = end.wires
    assert isinstance(wire, ObjectStoreTransport)
    before, wire._carrier.address = wire._carrier.address, address
    return before


def test_a_receiver_unknown_to_ray_is_named(make: Make) -> None:
    sender, receiver = make("sender"), make("receiver")
    before = receiver.apply(rename_carrier, "nobody")
    failed = sender.apply(push_all, receiver.peer, "lease", [1])
    receiver.apply(rename_carrier, before)
    assert isinstance(failed, Failed) and "there is no actor nobody" in failed.reason


def one_transfer(sender: RemoteSide, receiver: RemoteSide) -> list[int]:
    """Run a transfer and close both sides. Return each side's number of sockets, after restarting both."""
    receiver.apply(open_lease, "lease", [1])
    assert isinstance(sender.apply(push_all, receiver.peer, "lease", [1]), Completed)
    assert sender.close() == receiver.close() == []
    left = [side.apply(sockets) for side in (sender, receiver)]
    sender.start()
    receiver.start()
    return left


def test_closing_leaves_no_thread_no_socket_and_no_object(make: Make) -> None:
    sender, receiver = make("sender"), make("receiver")
    before = one_transfer(sender, receiver)
    for _ in range(2):
        assert one_transfer(sender, receiver) == before
    wait_stored(lambda stored: stored == 0)


def test_a_killed_sender_fails_the_lease_and_frees_its_objects(make: Make) -> None:
    sender, receiver = make("sender"), make("receiver", reconnect_grace_s=0.3)
    begin(sender, receiver)
    sender.kill()
    assert receiver.apply(wait_lease, "lease", PROMPT_S) == Failed("lease", "the sender is gone")
    assert receiver.apply(close_lease, "lease")
    wait_stored(lambda stored: stored == 0)
