"""Messages between workers by way of a carrier: in order, one bag at a time, never waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import worker.mail
from worker.mail import KIND, Mail


class HeldCarrier:
    """Holds every parcel back until the test lets it arrive, or fail."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.handlers: dict[str, Callable[[bytes, list[Any]], bool]] = {}
        self.held: list[tuple[str, bytes, Callable[[str], None]]] = []

    def handle(self, kind: str, handler: Callable[[bytes, list[Any]], bool]) -> None:
        self.handlers[kind] = handler

    def deliver(
        self, address: str, kind: str, parcel: bytes, objects: Sequence[Any], on_done: Callable[[str], None]
    ) -> None:
        assert kind == KIND
        self.held.append((address, parcel, on_done))

    def let_go(self, peer: HeldCarrier, error: str = "") -> None:
        """The oldest parcel arrives at `peer`."""
        address, parcel, on_done = self.held.pop(0)
        assert address == peer.address
        if not error:
            assert peer.handlers[KIND](parcel, [])
        on_done(error)


class Ends:
    def __init__(self) -> None:
        self.carriers = HeldCarrier("a"), HeldCarrier("b")
        self.arrivals = 0
        self.a, self.b = (Mail(carrier, self.on_arrival) for carrier in self.carriers)  # type: ignore[arg-type]

    def on_arrival(self) -> None:
        self.arrivals += 1

    def let_go(self, error: str = "") -> None:
        self.carriers[0].let_go(self.carriers[1], error)


def test_messages_arrive_in_order_with_their_senders_address() -> None:
    ends = Ends()
    for number in range(5):
        assert ends.a.send_request("b", b"request %d" % number)
        assert ends.a.send_reply("b", b"reply %d" % number)
    assert len(ends.carriers[0].held) == 1, "the second bag waits for the first"
    ends.let_go()
    assert ends.b.requests() == [("a", b"request 0")]
    assert ends.b.replies() == []
    ends.let_go()
    assert ends.b.requests() == [("a", b"request %d" % number) for number in range(1, 5)]
    assert ends.b.replies() == [("a", b"reply %d" % number) for number in range(5)]
    assert ends.b.requests() == ends.b.replies() == ends.carriers[0].held == []
    assert ends.arrivals == 2


def test_after_a_loss_the_next_message_goes_out() -> None:
    ends = Ends()
    ends.a.send_request("b", b"lost")
    ends.a.send_request("b", b"lost as well")
    ends.let_go("the peer died")
    assert ends.carriers[0].held == []
    ends.a.send_request("b", b"new")
    ends.let_go()
    assert ends.b.requests() == [("a", b"new")]


def test_what_waits_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker.mail, "MAX_WAITING", 3)
    ends = Ends()
    sent = [ends.a.send_request("b", b"%d" % number) for number in range(6)]
    assert sent == [True] * 4 + [False] * 2  # one on its way, three that wait


def test_garbage_is_dropped() -> None:
    ends = Ends()
    take = ends.carriers[1].handlers[KIND]
    assert not take(b"garbage", [])
    assert not take(b"", [])
    assert ends.b.requests() == [] and ends.arrivals == 0
