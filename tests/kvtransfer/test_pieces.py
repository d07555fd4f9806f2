"""The queue of pieces takes turns, and the account of a lease's time adds up."""

from __future__ import annotations

import pytest

from kvtransfer.extents import NO_RUNS
from kvtransfer.pieces import PieceQueue, QueuedPiece, TransferTime


def piece(lease: str, index: int, queued_at: float = 0.0, sent_at: float = 0.0) -> QueuedPiece:
    return QueuedPiece(lease, index, NO_RUNS, 0, False, queued_at=queued_at, sent_at=sent_at)


def drain(queue: PieceQueue) -> list[tuple[str, int]]:
    order = []
    while queue:
        taken = queue.take()
        assert taken is not None
        order.append((taken.lease_id, taken.index))
    return order


def test_leases_take_turns() -> None:
    queue = PieceQueue()
    queue.put([piece("a", index) for index in range(3)])
    queue.put([piece("b", 0)])
    assert drain(queue) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert queue.take() is None


def test_what_is_put_back_comes_first_in_its_order() -> None:
    queue = PieceQueue()
    queue.put([piece("a", index) for index in range(4)])
    taken = [queue.take(), queue.take()]
    queue.put_back([each for each in taken if each is not None])
    assert drain(queue) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]


def test_a_dropped_lease_is_gone() -> None:
    queue = PieceQueue()
    queue.put([piece("a", 0), piece("b", 0)])
    queue.drop("a")
    queue.drop("nobody")
    assert drain(queue) == [("b", 0)]


def test_overlapping_pieces_count_once_and_only_what_came_before_the_end_is_hidden() -> None:
    time = TransferTime(started=10.0)
    for sent, acknowledged in ((10.0, 12.0), (11.0, 13.0), (20.0, 21.0), (20.2, 20.4)):
        time.add(piece("a", 0, queued_at=sent - 0.5, sent_at=sent), acknowledged)
    assert time.busy_s() == pytest.approx(4.0)
    assert time.busy_s(until=12.5) == pytest.approx(2.5)
    assert time.busy_s(until=9.0) == 0.0
    assert time.wait_s == pytest.approx(2.0)
