"""Damaged pieces are counted, named and sent again; none of their bytes are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvtransfer.streams.connection
from kvtransfer.blocks.extents import BlockIndices, Mode
from kvtransfer.interface import Completed, Failed, Progress, RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import CHECKSUM_MISMATCH, GOOD, UNKNOWN_LEASE, Ack, Piece
from kvtransfer.streams.link import MAX_ATTEMPTS
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.shm import ShmReader
from kvtransfer.transports.tcp import TcpReader
from tests.kvtransfer.test_leases import BLOCK, runs
from tests.kvtransfer.test_unlike_pools import pool as meaningful_pool
from tests.kvtransfer.test_unlike_pools import tokens_of
from tests.kvtransfer.transfer_sides import RawPeer, RawReceiver, ReceiverEnd, SenderEnd, block, make_pool

Closing = Callable[[Any], Any]
READERS: dict[str, Any] = {"shm": ShmReader, "tcp": TcpReader}
NUM_BLOCKS = 8


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch, transport: str) -> Callable[[int], None]:
    """Return `damage(n)`, which damages the first block of the next n pieces on the way."""
    reader = READERS[transport]
    read = reader.read
    left = 0

    def damaging(self: Any, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        nonlocal left
        in_place = bool(read(self, sources, targets, gate))
        if in_place and left:
            left -= 1
            target: RegisteredPool = self._pool
            start = int(targets[0]) * target.block_bytes
            target.buffer[start : start + target.block_bytes] = bytes(target.block_bytes)
        return in_place

    def begin(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(reader, "read", damaging)
    return begin


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_damaged_piece_is_sent_again(
    closing: Closing, transport: str, damage: Callable[[int], None], mode: Mode
) -> None:
    sender = closing(SenderEnd([transport], make_pool(seed=1), checksum=mode))
    receiver = closing(ReceiverEnd([transport], make_pool(seed=2)))
    receiver.open("lease", range(NUM_BLOCKS))
    damage(MAX_ATTEMPTS - 1)
    sender.push(receiver.peer, "lease", range(20, 20 + NUM_BLOCKS))
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert receiver.wait_for() == [Progress("lease", NUM_BLOCKS, complete=True)]
    for index in range(NUM_BLOCKS):
        assert block(receiver.pool, index) == block(sender.pool, 20 + index)
    assert sender.sender.counters()["pieces_sent_again"] == MAX_ATTEMPTS - 1
    for side in (sender.sender, receiver.receiver):
        assert side.counters()["failures_checksum_mismatch"] == MAX_ATTEMPTS - 1
    assert sender.sender.counters()["connections_made"] == 1


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_connection_that_always_damages_only_fails_the_lease(
    closing: Closing, transport: str, damage: Callable[[int], None], mode: Mode
) -> None:
    sender = closing(SenderEnd([transport], make_pool(seed=1), checksum=mode))
    receiver = closing(ReceiverEnd([transport], make_pool(seed=2)))
    receiver.open("lease", range(NUM_BLOCKS))
    damage(MAX_ATTEMPTS)
    sender.push(receiver.peer, "lease", range(NUM_BLOCKS))
    assert sender.wait_lease("lease") == Failed("lease", CHECKSUM_MISMATCH)
    assert receiver.receiver.poll() == []
    receiver.open("next", [60])
    sender.push(receiver.peer, "next", [3])
    assert isinstance(sender.wait_lease("next"), Completed)
    assert block(receiver.pool, 60) == block(sender.pool, 3)


@pytest.mark.parametrize("wire_dtype", ["auto", "int8", "fp8"])
def test_checksums_are_checked_before_conversion(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, wire_dtype: str
) -> None:
    source_pool, source = meaningful_pool("bfloat16")
    target_pool, target = meaningful_pool("float32")
    source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(1)))
    read, left = TcpReader.read, [1]

    def damaging(self: Any, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        in_place = read(self, sources, targets, gate)
        if left:
            left.pop()
            self._pool.buffer[7] ^= 0x40
        return in_place

    monkeypatch.setattr(TcpReader, "read", damaging)
    options = TransportOptions(wire_dtype=wire_dtype)
    sender = closing(SenderEnd(["tcp"], source_pool, options, checksum="full"))
    receiver = closing(ReceiverEnd(["tcp"], target_pool))
    receiver.open("lease", range(4))
    sender.push(receiver.peer, "lease", [5, 3, 4, 9])
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert receiver.receiver.counters()["failures_checksum_mismatch"] == 1
    sent, arrived = tokens_of(source, [5, 3, 4, 9]), tokens_of(target, list(range(4)))
    tolerance = {"auto": 0.0, "int8": 0.04, "fp8": 0.25}[wire_dtype]
    assert (arrived - sent).abs().max() <= tolerance


def test_an_announced_checksum_must_come(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"]))
    raw = closing(RawPeer.connect(receiver, "tcp", make_pool(), checksum="full"))
    receiver.open("lease", [1])
    for sequence, checksum in enumerate((None, bytes(8)), 1):
        raw.send(Piece(sequence, "lease", 0, 1, runs((0, 0, 1)), True, checksum, attempt=sequence))
        raw.send_bytes(bytes(BLOCK) + GOOD)
        assert raw.ack() == Ack(sequence, CHECKSUM_MISMATCH, again=True)
    assert receiver.receiver.poll() == []


def test_a_receiver_that_finds_every_piece_damaged_fails_the_lease(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], checksum="full"))
    raw_receiver = closing(RawReceiver(transport, make_pool()))
    sender.push(raw_receiver.peer, "lease", [0])
    raw = closing(raw_receiver.accept())
    checksums = set()
    for _ in range(MAX_ATTEMPTS):
        piece = raw_receiver.piece(raw)
        checksums.add(piece.checksum)
        if transport == "tcp":
            raw.channel.recv_exact(BLOCK + len(GOOD), raw.deadline())
        raw.send(Ack(piece.sequence, CHECKSUM_MISMATCH, again=True))
    assert sender.wait_lease("lease") == Failed("lease", CHECKSUM_MISMATCH)
    assert len(checksums) == 1 and None not in checksums


def test_a_damaged_piece_of_a_closed_lease_does_not_count(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The lease is closed between the piece's last byte and its check."""
    sender = closing(SenderEnd([transport], checksum="full"))
    receiver = closing(ReceiverEnd([transport], make_pool()))
    receiver.open("lease", [1])

    def closing_checksum(*arguments: Any) -> bytes:
        receiver.receiver.close_lease("lease")
        return bytes(8)

    monkeypatch.setattr(kvtransfer.streams.connection, "piece_checksum", closing_checksum)
    sender.push(receiver.peer, "lease", [5])
    assert sender.wait_lease("lease") == Failed("lease", UNKNOWN_LEASE)
    assert receiver.receiver.poll() == []
