"""A bad wire between good processes: bytes that are lost, late, damaged, doubled or swapped."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.blocks.extents import RUN_BYTES
from kvtransfer.messages import GOOD, PREFIX_BYTES, Ack, Piece, decode, frame_length
from tests.faults.arena import DEADLINE_S, ORPHAN_S, Arena, Request, needs_nixl
from tests.faults.points import CONVERTING
from tests.faults.processes import LARGE, SMALL, Child, Stock
from tests.faults.proxy import Damage, Kind

COUNT, CHUNK = 24, 6
UPSTREAM = [
    "hello",
    "proof",
    "length",
    "header",
    "positions",
    "payload",
    "trailer",
    "second length",
    "last payload",
]
HANDSHAKE = {"hello", "proof", "challenge", "verdict"}
KINDS: dict[Kind, int] = {"drop": 1, "hang": 1, "corrupt": 1, "truncate": 5, "swap": 7, "repeat": 5}
"""Kinds of damage, with the number of bytes."""
PATIENT: dict[str, Any] = {"progress_timeout_s": 1.0, "connect_timeout_s": 2.0, "reconnect_grace_s": 2.0}
"""A wire that hangs is found soon, and good connections on a busy machine last, since nobody dies here."""


@pytest.fixture(scope="module")
def places(stock: Stock) -> dict[str, int]:
    arena = Arena(stock)
    sender, receiver = arena.sender(checksum="full"), arena.receiver()
    proxy, peer = arena.proxy(receiver)
    arena.serve(sender, receiver, COUNT, chunk=CHUNK, peer=peer)
    arena.drop(proxy)
    arena.check(sender, receiver)
    arena.close()
    return upstream_places(bytes(proxy.spoken[True]), SMALL[1]) | downstream_places(
        bytes(proxy.spoken[False])
    )


def request_through(
    arena: Arena, *damages: Damage, allow_corrupt: bool = False, checksum: str = "full"
) -> tuple[Child, Child, Request]:
    """Run a request over a damaged wire and return it with its outcome."""
    sender, receiver = arena.sender(checksum=checksum, **PATIENT), arena.receiver(**PATIENT)
    proxy, peer = arena.proxy(receiver, *damages)
    request = arena.begin(sender, receiver, COUNT, chunk=CHUNK, peer=peer)
    arena.finish(request, of="sender")
    arena.finish(
        request,
        deadline_s=DEADLINE_S if request.sent == "completed" else ORPHAN_S,
        allow_corrupt=allow_corrupt,
    )
    assert proxy.struck.is_set(), "the damage was beyond what was said"
    arena.drop(proxy)
    return sender, receiver, request


DAMAGES: dict[Kind, list[str]] = {
    "drop": ["hello", "verdict", "length", "payload", "trailer", "ack", "last ack"],
    "hang": ["proof", "challenge", "length", "payload", "trailer", "ack"],
    "corrupt": [*sorted(HANDSHAKE), "length", "header", "positions", "payload", "trailer", "ack"],
    "truncate": ["length", "header", "positions", "payload", "trailer", "second length", "ack"],
    "swap": ["length", "header", "positions", "payload", "trailer", "last payload", "ack"],
    "repeat": ["length", "header", "positions", "payload", "trailer", "ack"],
}
"""Connections break alike at each place; changed bytes are found by what they belong to."""


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(kind, place, id=f"{kind}, {place}")
        for kind, places in DAMAGES.items()
        for place in places
    ],
)
def test_one_damage(arena: Arena, places: dict[str, int], kind: Kind, place: str) -> None:
    """Damage in the handshake leads to one clear error. Later damage is repaired."""
    damage = Damage(kind, places[place], KINDS[kind], upstream=place in UPSTREAM)
    sender, receiver, request = request_through(arena, damage)
    assert request.sent == ("failed" if place in HANDSHAKE else "completed"), request.outcomes
    arena.check(sender, receiver)


@pytest.mark.parametrize("seconds", [0.2, 1.0])
@pytest.mark.parametrize("place", ["length", "payload", "last ack"])
def test_a_slow_wire(arena: Arena, places: dict[str, int], place: str, seconds: float) -> None:
    """If it takes too long, both sides give the connection up, and continue over a new one."""
    damage = Damage("delay", places[place], seconds=seconds, upstream=place in UPSTREAM)
    sender, receiver, request = request_through(arena, damage)
    assert request.sent == "completed" and (seconds == 1.0 or request.received == "completed")
    arena.check(sender, receiver)


@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate"])
def test_a_wire_that_never_works(arena: Arena, places: dict[str, int], kind: Kind) -> None:
    """One clear error after a bounded number of tries."""
    every = range(60 if kind == "corrupt" else 1)
    offsets = [places["payload"] + piece * CHUNK * SMALL[1] for piece in every]
    damages = [Damage(kind, offset, KINDS[kind], connection=-1) for offset in offsets]
    sender, receiver, request = request_through(arena, *damages)
    assert request.sent == "failed"
    if kind == "corrupt":
        assert "checksum" in request.reasons
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("length", "truncate"),
        ("header", "corrupt"),
        ("positions", "repeat"),
        ("payload", "corrupt"),
        ("payload", "truncate"),
        ("trailer", "corrupt"),
        ("ack", "repeat"),
    ],
)
def test_without_checksums_nothing_hangs(
    arena: Arena, places: dict[str, int], kind: Kind, place: str
) -> None:
    """Only the blocks' own bytes may be wrong then."""
    damage = Damage(kind, places[place], KINDS[kind], upstream=place in UPSTREAM)
    in_payload = place == "payload" and kind == "corrupt"
    sender, receiver, request = request_through(arena, damage, allow_corrupt=in_payload, checksum="off")
    assert request.received == ("corrupt" if in_payload else "completed")
    arena.check(sender, receiver)


@pytest.mark.parametrize(("streams", "checksum"), [(2, "sampled"), (4, "full")])
def test_one_of_several_streams_breaks(arena: Arena, checksum: str, streams: int) -> None:
    sender = arena.sender(checksum=checksum, streams=streams, **PATIENT)
    receiver = arena.receiver(streams=streams, **PATIENT)
    proxy, peer = arena.proxy(receiver, Damage("drop", 100_000, connection=0))
    request = arena.begin(sender, receiver, 96, chunk=8, peer=peer)
    arena.finish(request)
    assert request.sent == "completed"
    arena.drop(proxy)
    arena.check(sender, receiver)


@pytest.mark.parametrize(("kind", "offset"), [("drop", 300_000), ("hang", 3_000_000), ("corrupt", 3_000_000)])
def test_pieces_larger_than_the_sockets_hold(arena: Arena, kind: Kind, offset: int) -> None:
    sender = arena.sender(size=LARGE, checksum="full", **PATIENT)
    receiver = arena.receiver(size=LARGE, **PATIENT)
    proxy, peer = arena.proxy(receiver, Damage(kind, offset))
    request = arena.begin(sender, receiver, 48, chunk=24, peer=peer)
    arena.finish(request)
    assert proxy.struck.is_set() and (request.sent, request.received) == ("completed", "completed")
    arena.drop(proxy)
    arena.check(sender, receiver)


@needs_nixl
@pytest.mark.parametrize("transport", ["ucx"])
@pytest.mark.parametrize("kind", ["drop", "truncate"])
def test_the_wire_of_messages_beside_ucx_breaks(arena: Arena, kind: Kind) -> None:
    """Blocks and the messages about them take different connections."""
    sender, receiver = arena.sender(**PATIENT), arena.receiver(**PATIENT)
    plain, through = arena.proxy(receiver, transport="ucx")
    arena.serve(sender, receiver, COUNT, chunk=CHUNK, peer=through)
    said = len(plain.spoken[True])
    arena.drop(plain)
    arena.check(sender, receiver)

    sender, receiver = arena.sender(**PATIENT), arena.receiver(**PATIENT)
    proxy, through = arena.proxy(receiver, Damage(kind, said - 100, KINDS[kind]), transport="ucx")
    request = arena.begin(sender, receiver, COUNT, chunk=CHUNK, peer=through)
    arena.finish(request)
    assert proxy.struck.is_set() and request.sent == "completed"
    arena.drop(proxy)
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("transport", "point", "nth"),
    [
        ("tcp", "piece sent", 2),
        ("shm", "ack arrives", 1),
        ("tcp", "converting", 2),
        pytest.param("ucx", "ack arrives", 1, marks=needs_nixl),
    ],
)
def test_every_connection_breaks_at_once(arena: Arena, point: str, nth: int) -> None:
    """The same wire is connected again without anyone being told."""
    sender, receiver = arena.sender(**PATIENT), arena.receiver(**PATIENT)
    (receiver if point in CONVERTING else sender).arm(point, "CUT", nth)
    request = arena.begin(sender, receiver)
    arena.finish(request)
    assert (request.sent, request.received) == ("completed", "completed")
    assert sender.ask("counters")["connections_made"] == 2
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("first", "point"),
    [("shm", "piece admitted"), ("shm", "ack due"), pytest.param("ucx", "in place", marks=needs_nixl)],
)
def test_the_next_transport_takes_over(stock: Stock, first: str, point: str) -> None:
    arena = Arena(stock, (first, "tcp"))
    sender, receiver = arena.sender(**PATIENT), arena.receiver(**PATIENT)
    receiver.arm(point, "CUT", 2)
    request = arena.begin(sender, receiver)
    arena.finish(request)
    assert request.outcomes["sender"] == ("completed", "tcp") and request.received == "completed"
    assert sender.ask("counters")["fallbacks"] == 1
    arena.check(sender, receiver)
    arena.close()


def _frame_at(data: bytes, start: int) -> bytes:
    end = start + PREFIX_BYTES + frame_length(data[start:])
    return data[start + PREFIX_BYTES : end]


def upstream_places(spoken: bytes, block_bytes: int) -> dict[str, int]:
    """Return offsets in the bytes of a sender over `tcp`."""
    at = _handshake(spoken, "hello", "proof")
    start, number, places = at.pop("end"), 0, dict(at)
    while start < len(spoken):
        message = _frame_at(spoken, start)
        piece = decode(message, Piece)
        number += 1
        name = {1: "", 2: "second ", 3: "third "}.get(number, "last ")
        payload = start + PREFIX_BYTES + len(message)
        nbytes = block_bytes * sum(
            int.from_bytes(piece.runs[run + 8 : run + 12], "little")
            for run in range(0, len(piece.runs), RUN_BYTES)
        )
        places[f"{name}length"] = start + 1
        places[f"{name}header"] = start + PREFIX_BYTES + message.index(piece.lease_id.encode())
        places[f"{name}positions"] = start + PREFIX_BYTES + message.index(piece.runs) + 4
        places[f"{name}payload"] = payload + nbytes // 2
        places[f"{name}trailer"] = payload + nbytes
        start = payload + nbytes + len(GOOD)
    return places


def downstream_places(spoken: bytes) -> dict[str, int]:
    """Return offsets in the bytes of its receiver."""
    at = _handshake(spoken, "challenge", "verdict")
    start, number, places = at.pop("end"), 0, dict(at)
    while start < len(spoken):
        message = _frame_at(spoken, start)
        decode(message, Ack)
        number += 1
        name = {1: "", 2: "second ", 3: "third "}.get(number, "last ")
        places[f"{name}ack"] = start + PREFIX_BYTES + 1
        start += PREFIX_BYTES + len(message)
    return places


def _handshake(spoken: bytes, *names: str) -> dict[str, int]:
    """Return the offset of each message's middle, and the `end` of the last."""
    places, start = {}, 0
    for name in names:
        length = len(_frame_at(spoken, start))
        places[name] = start + PREFIX_BYTES + length // 2
        start += PREFIX_BYTES + length
    return places | {"end": start}
