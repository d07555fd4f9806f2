"""A wire's speed, from its totals."""

from __future__ import annotations

import random

import pytest

from kvtransfer.pairs import Pairs
from kvtransfer.speed import WireSpeed

LATENCY_S, BYTES_PER_S = 2e-4, 5e8


def test_latency_and_bandwidth_are_told_apart():
    speed, rng = WireSpeed(), random.Random(0)
    pieces = nbytes = seconds = 0.0
    for _ in range(60):
        count = rng.randint(1, 20)
        size = count * rng.randint(1_000, 2_000_000)
        pieces, nbytes = pieces + count, nbytes + size
        seconds += (count * LATENCY_S + size / BYTES_PER_S) * rng.uniform(0.9, 1.1)
        speed.look(pieces, nbytes, seconds)
        speed.look(pieces, nbytes, seconds)
    assert speed.latency_s == pytest.approx(LATENCY_S, rel=0.2)
    assert speed.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.2)


def test_pieces_all_alike_give_the_bandwidth_alone():
    speed = WireSpeed()
    assert speed.bytes_per_s == 0.0
    for count in range(1, 30):
        speed.look(count, count * 1e6, count * 4e-3)
    assert (speed.latency_s, speed.bytes_per_s) == (0.0, pytest.approx(1e6 / 4e-3))


def test_each_pair_and_transport_has_its_own():
    pairs = Pairs()
    for transport, seconds in (("tcp", 0.5), ("shm", 0.01)):
        moved = {"kv_transfer_pieces_total": 4, "kv_transfer_bytes_total": 1e6}
        pairs.add("decode-0", transport, moved | {"kv_transfer_wire_seconds_total": seconds})
    pairs.snapshot({})
    speeds = {pair.transport: pair.bytes_per_s for pair in pairs.snapshot({"decode-0": "shm"})}
    assert speeds == pytest.approx({"tcp": 2e6, "shm": 1e8})
