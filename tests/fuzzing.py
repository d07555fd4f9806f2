"""Fuzzes listeners and decoders: a few examples each time, or for FUZZ_SECONDS if that is set.

FUZZ_SECONDS=600 pytest --timeout 700 -k fuzz tests
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import msgspec
import psutil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers.seeds import seed

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
GROWTH_BYTES = 64 * 2**20
"""The most memory that a long run may add to this process after its first tenth."""

_keys = st.text(max_size=8) | st.just("x" * 3000)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.just("x" * 3000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=8,
)
"""Draws any JSON value, and some values that JSON cannot express."""

_SIZES = [0, 1, 7, 9, 31, 33, 64, 65, 128, 129, 512, 513, 4096, 4097, 50_000]
_NUMBERS = [-(2**63), -1, 0, 1, 4, 5, 15, 16, 2**16, 2**31 - 1, 2**31, 2**62 - 1, 2**62, 2**64 - 1]
_EDGES: dict[type, list[Any]] = {
    int: _NUMBERS,
    float: [0.0, -1.0, 1.5, 1e9, 1.1e9, float("inf"), float("nan")],
    str: ["x" * size for size in _SIZES],
    bytes: [b"x" * size for size in _SIZES],
}
_ANY_EDGE = [None, True, [], {}, *(value for values in _EDGES.values() for value in values)]


def fuzz(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], examples: int) -> None:
    """Run `check`, which raises for harmful examples. Each round draws other examples from the run's seed."""
    process = psutil.Process()
    started = time.monotonic()
    rss: int | None = None
    for number in itertools.count():
        run = settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )(given(strategy)(check))
        hypothesis.seed(seed() * 1000 + number)(run)()
        spent = time.monotonic() - started
        if rss is None and spent > SECONDS / 10:
            rss = process.memory_info().rss
        if spent >= SECONDS:
            break
    if SECONDS:
        assert rss is not None and process.memory_info().rss - rss < GROWTH_BYTES
        print(f"\n{number + 1} rounds of {examples} examples in {spent:.0f} s")


@st.composite
def damaged(draw: st.DrawFn, whole: Sequence[bytes]) -> bytes:
    """Draw one of these messages with some bytes changed, removed, inserted, cut off or appended."""
    raw = bytearray(draw(st.sampled_from(list(whole))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    if draw(st.booleans()):
        del raw[draw(st.integers(0, len(raw))) :]
    return bytes(raw) + draw(st.sampled_from([b"", b"\0", b"\xff" * 9]))


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + b"k" * 32 + bytes(8) + b"s" * 80
_openings = damaged([_GREETING, _GREETING + _HELLO, _HELLO, b"\x04\x05READY", b"\x02" + b"\xff" * 8])
zmq_strangers = st.lists(_openings | st.binary(max_size=100), max_size=3)
"""Draws what a stranger without the keys may send to a ZeroMQ socket."""


def say(host: str | None, port: int | None, parts: Sequence[bytes]) -> None:
    """Connect and send the parts, as far as the peer accepts them."""
    with socket.create_connection((host, port), timeout=10) as client:
        for part in parts:
            try:
                client.sendall(part)
            except ConnectionError:
                break


def each_edge(message: bytes) -> Iterator[bytes]:
    """Yield this msgpack message with each value replaced in turn by extreme values."""
    yield from map(msgspec.msgpack.encode, _replaced(msgspec.msgpack.decode(message)))


def _replaced(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict):
        for place in list(value) if isinstance(value, dict) else range(len(value)):
            for other in _replaced(value[place]):
                changed = value.copy()
                changed[place] = other
                yield changed
    if isinstance(value, list):
        yield value * 20
    yield from _EDGES.get(type(value), _ANY_EDGE)


def too_deep(message: bytes) -> bytes:
    """Return this msgpack map or list with one more item: 60,000 nested lists."""
    is_map = message[0] >> 4 == 8
    assert is_map or message[0] >> 4 == 9
    return bytes([message[0] + 1]) + message[1:] + b"\xa5later" * is_map + b"\x91" * 60_000 + b"\xc0"


@st.composite
def altered(draw: st.DrawFn, whole: Sequence[bytes]) -> bytes:
    """Draw one of these msgpack messages with up to three values replaced by extreme ones or ones of other
    types.
    """
    value = msgspec.msgpack.decode(draw(st.sampled_from(list(whole))))
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_altered(value))
    return msgspec.msgpack.encode(value)


@st.composite
def _altered(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, list | dict) and value and draw(st.integers(0, 7)):
        place = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        other = value.copy()
        other[place] = draw(_altered(value[place]))
        return other
    return draw(st.sampled_from(_EDGES.get(type(value), _ANY_EDGE)) | st.sampled_from(_ANY_EDGE))
