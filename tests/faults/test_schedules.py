"""Random schedules of faults over some requests.

Each is a function of its seed, which is in the test's name. TANDEM_FAULT_SEEDS chooses others: `17` or `17,23`
replays these, `1000-1999` runs a range.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.arena import ORPHAN_S, SMALL, Arena, Child, Request, Stock
from tests.faults.points import ONLY_OVER, RECEIVER_POINTS, SENDER_POINTS, Action, Fault, Point
from tests.faults.proxy import Damage, Kind

DEFAULT_SEEDS = "0-199"
ROUND_S = 2.5
"""For the requests of a schedule to end once nothing holds them up; two timeouts, and some more."""

TRANSPORTS = [("tcp",), ("shm",), ("shm", "tcp"), ("tcp", "shm")]
WITH_UCX = [("ucx",), ("ucx", "tcp")]
UCX_SHARE = 0.06
"""Of the schedules: an agent takes half a second to start."""


def seeds() -> Iterator[int]:
    for part in os.environ.get("TANDEM_FAULT_SEEDS", DEFAULT_SEEDS).split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@dataclass(frozen=True)
class Work:
    """One request: how many blocks, in chunks of how many, and how it may be ended early."""

    count: int
    chunk: int
    end: str = ""


@dataclass(frozen=True)
class Schedule:
    transports: tuple[str, ...]
    checksum: str
    streams: int
    faults: tuple[tuple[str, Fault], ...]
    damages: tuple[Damage, ...]
    work: tuple[Work, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        with_ucx = importlib.util.find_spec("nixl") is not None and rng.random() < UCX_SHARE
        transports = rng.choice(WITH_UCX if with_ucx else TRANSPORTS)
        damages = () if rng.random() < 0.5 or "tcp" not in transports else _damages(rng)
        faults = tuple(_fault(rng, transports) for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])))
        return cls(
            transports=transports,
            checksum="full" if damages else rng.choice(["off", "sampled", "full"]),
            streams=rng.choice([1, 1, 1, 2]),
            faults=faults,
            damages=damages,
            work=tuple(_work(rng) for _ in range(rng.randint(1, 4))),
        )


def _fault(rng: random.Random, transports: tuple[str, ...]) -> tuple[str, Fault]:
    role: str = rng.choice(["sender", "receiver"])
    points: dict[str, Point] = SENDER_POINTS if role == "sender" else RECEIVER_POINTS
    names = [name for name in points if ONLY_OVER.get(name, transports[0]) in transports]
    actions: list[Action] = ["KILL", "CUT", "CUT", "STOP", "HOLD"]
    return role, Fault(rng.choice(names), rng.choice(actions), rng.choice([1, 1, 2, 3, 5]))


def _damages(rng: random.Random) -> tuple[Damage, ...]:
    kinds: list[Kind] = ["drop", "hang", "delay", "corrupt", "truncate", "swap", "repeat"]
    found = []
    for _ in range(rng.randint(1, 2)):
        upstream = rng.random() < 0.8
        offset = rng.choice([rng.randrange(600), rng.randrange(200_000)]) if upstream else rng.randrange(250)
        length, seconds = rng.choice([1, 3, 100, 5000]), rng.choice([0.05, 0.7])
        found.append(Damage(rng.choice(kinds), offset, length, seconds, upstream, rng.choice([0, 0, 1, -1])))
    return tuple(found)


def _work(rng: random.Random) -> Work:
    count = rng.choice([1, 5, 12, 24, 40, SMALL[0]])
    return Work(count, rng.choice([1, 4, 8, 40]), rng.choice(["", "", "", "", "abort", "expire"]))


@pytest.mark.parametrize("seed", list(seeds()))
def test_schedule(stock: Stock, seed: int) -> None:
    schedule = Schedule.of(seed)
    print(f"seed {seed}: {schedule}")
    arena = Arena(stock, schedule.transports)
    try:
        _run(arena, schedule)
    finally:
        arena.close()


def _run(arena: Arena, schedule: Schedule) -> None:
    sender = arena.sender(checksum=schedule.checksum, streams=schedule.streams)
    receiver = arena.receiver(streams=schedule.streams)
    peer, proxy = receiver.peer, None
    if schedule.damages:
        proxy, peer = arena.proxy(receiver, *schedule.damages)
    for child in (sender, receiver):
        child.ask("arm", [fault for role, fault in schedule.faults if role == child.role])
    requests = [_begin(arena, sender, receiver, work, peer) for work in schedule.work]
    _end_early(arena, requests, schedule.work)
    _finish(arena, requests, sender, receiver)
    if proxy is not None:
        arena.drop(proxy)
    survivors = [child for child in (sender, receiver) if child.alive and not child.frozen]
    for child in survivors:
        child.ask("arm", [])
    arena.check(*survivors or [arena.sender("prefill-late"), arena.receiver("decode-late")])
