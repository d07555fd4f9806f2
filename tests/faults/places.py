"""Finds the offsets of messages in a connection's bytes by parsing a good connection."""

from __future__ import annotations

from kvtransfer.blocks.extents import RUN_BYTES
from kvtransfer.messages import GOOD, PREFIX_BYTES, Ack, Piece, decode, frame_length


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
