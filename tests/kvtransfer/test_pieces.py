"""The queue of pieces alternates between leases, and a lease's times add up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvtransfer.blocks.extents import NO_BLOCKS
from kvtransfer.lease import ArrivalRecord, PieceArrival
from kvtransfer.messages import Piece
from kvtransfer.streams.pieces import PieceQueue, QueuedPiece, TransferTime


def piece(lease: str, index: int, queued_at: float = 0.0, sent_at: float = 0.0) -> QueuedPiece:
    return QueuedPiece(lease, index, [NO_BLOCKS], 0, False, queued_at=queued_at, sent_at=sent_at)


def drain(queue: PieceQueue) -> list[tuple[str, int]]:
    order = []
    while queue:
        taken = queue.take(1)
        assert taken is not None
        order.append((taken.lease_id, taken.index))
    return order


def test_leases_take_turns() -> None:
    queue = PieceQueue()
    for lease, index in [("a", 0), ("a", 1), ("a", 2), ("b", 0)]:
        queue.put(piece(lease, index))
    assert drain(queue) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert queue.take(1) is None


def test_a_connection_gets_as_many_parts_as_it_takes_at_once() -> None:
    """Parts are single again after a larger piece has come back from a connection that takes several."""
    parts = list(np.arange(10).reshape(2, 5, 1).swapaxes(0, 1))
    queue = PieceQueue()
    queue.put(QueuedPiece("a", 3, parts, 0, True))
    queue.put(piece("b", 0))
    first = queue.take(3)
    assert first is not None
    assert (first.index, first.final, first.blocks.tolist()) == (3, False, [[0, 1, 2], [5, 6, 7]])
    assert drain(queue) == [("b", 0), ("a", 6), ("a", 7)]
    queue.put_back([first])
    assert drain(queue) == [("a", 3), ("a", 4), ("a", 5)]


def test_only_the_last_part_is_final() -> None:
    first, last = QueuedPiece("a", 0, [NO_BLOCKS] * 3, 0, True).split(2)
    assert (first.final, len(first.parts), last.final, last.index) == (False, 2, True, 2)


def test_returned_pieces_come_first_in_their_order() -> None:
    queue = PieceQueue()
    for index in range(4):
        queue.put(piece("a", index))
    taken = [queue.take(1), queue.take(1)]
    queue.put_back([each for each in taken if each is not None])
    assert drain(queue) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_a_dropped_lease_leaves_the_queue() -> None:
    queue = PieceQueue()
    queue.put(piece("a", 0))
    queue.put(piece("b", 0))
    queue.drop("a")
    queue.drop("nobody")
    assert drain(queue) == [("b", 0)]


def test_overlapping_pieces_count_once_and_only_time_before_the_end_is_hidden() -> None:
    time = TransferTime(started=10.0)
    for sent, acknowledged in ((10.0, 12.0), (11.0, 13.0), (20.0, 21.0), (20.2, 20.4)):
        time.add(piece("a", 0, queued_at=sent - 0.5, sent_at=sent), acknowledged)
    assert time.busy_s() == pytest.approx(4.0)
    assert time.busy_s(until=12.5) == pytest.approx(2.5)
    assert time.busy_s(until=9.0) == 0.0
    assert time.wait_s == pytest.approx(2.0)


def test_an_arrivals_times_need_no_common_clock() -> None:
    """The last piece was pushed two seconds after the first, and each waited before it was sent."""
    arrivals, now = ArrivalRecord(), time.monotonic()
    last = Piece(9, "lease", 1, 1, b"", final=True, pushed_s=2.0, waited_s=0.1)
    first = Piece(8, "lease", 0, 1, b"", final=False, pushed_s=0.0, waited_s=0.5)
    arrivals.add(last, PieceArrival("tcp", "", 100, announced=now - 0.1))
    arrivals.add(first, PieceArrival("tcp", "int8", 300, announced=now - 2.0))
    arrival = arrivals.arrival()
    assert (arrival.transport, arrival.nbytes) == ("tcp", 400)
    assert arrival.seconds == pytest.approx(2.5, abs=0.1)
    assert arrival.exposed_s == pytest.approx(0.5, abs=0.1)
    assert arrival.wait_s == pytest.approx(0.6)
    assert arrival.foreign_formats == {"int8"}
    assert now <= arrival.at <= time.monotonic()
