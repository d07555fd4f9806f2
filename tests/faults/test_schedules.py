"""Random schedules of faults over some requests, each a function of the seed in its test's name."""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.arena import Arena, Request
from tests.faults.points import CONVERTING, ONLY_OVER, RECEIVER_POINTS, SENDER_POINTS, Action, Fault, Point
from tests.faults.processes import SMALL, Child, DiedError, Keeper, Stock
from tests.faults.proxy import Damage, Kind
from tests.faults.sides import HASTY
from tests.tiers.seeds import seeds

SCHEDULES = 40
ORPHAN_S = 0.5
"""The time after which a receiver counts its sender as gone."""
ROUND_S = 4.0
"""Once nothing holds a schedule's requests up, they end in this time: two time-outs and some more."""

AT_ONCE = 4

TRANSPORTS = [("tcp",), ("shm",), ("shm", "tcp"), ("tcp", "shm")]
WITH_UCX = [("ucx",), ("ucx", "tcp")]
UCX_SHARE = 0.06
"""The share of schedules with UCX, whose agent takes half a second to start."""


@dataclass(frozen=True)
class Work:
    """A request: its number of blocks, the blocks of a chunk, and how it may be ended early."""

    count: int
    chunk: int
    end: str = ""


@dataclass(frozen=True)
class Schedule:
    transports: tuple[str, ...]
    checksum: str
    streams: int
    converting: bool
    faults: tuple[tuple[str, Fault], ...]
    damages: tuple[Damage, ...]
    work: tuple[Work, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        with_ucx = importlib.util.find_spec("nixl") is not None and rng.random() < UCX_SHARE
        transports = rng.choice(WITH_UCX if with_ucx else TRANSPORTS)
        converting = rng.random() < 0.15
        damages = () if rng.random() < 0.5 or "tcp" not in transports else _damages(rng)
        faults = tuple(_fault(rng, transports, converting) for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])))
        return cls(
            transports=transports,
            checksum="full" if damages else rng.choice(["off", "sampled", "full"]),
            streams=rng.choice([1, 1, 1, 2]),
            converting=converting,
            faults=faults,
            damages=damages,
            work=tuple(_work(rng) for _ in range(rng.randint(1, 4))),
        )


def _fault(rng: random.Random, transports: tuple[str, ...], converting: bool) -> tuple[str, Fault]:
    role: str = rng.choice(["sender", "receiver"])
    points: dict[str, Point] = SENDER_POINTS if role == "sender" else RECEIVER_POINTS
    names = [name for name in points if ONLY_OVER.get(name, transports[0]) in transports]
    names = [name for name in names if converting or name not in CONVERTING]
    action: Action = rng.choice(["KILL", "CUT", "CUT", "STOP", "HOLD"])
    seconds = rng.choice([0.02, 0.2, 0.8]) if action == "HOLD" else rng.choice([0.05, 0.9, None])
    return role, Fault(rng.choice(names), action, rng.choice([1, 1, 2, 3, 5]), seconds)


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


@pytest.fixture(scope="module")
def running(stock: Stock, request: pytest.FixtureRequest) -> Iterator[dict[int, Future[None]]]:
    """Run all the schedules of this session, several at once, since they mostly wait."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    items = [item for item in items if item.module is request.module]
    chosen: list[Any] = [
        item.callspec.params["seed"] for item in items if item.originalname == "test_a_random_schedule"
    ]
    executor = ThreadPoolExecutor(AT_ONCE)
    yield {seed: executor.submit(_run, stock, Schedule.of(seed)) for seed in chosen}
    executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("seed", seeds(SCHEDULES))
def test_a_random_schedule(running: dict[int, Future[None]], seed: int) -> None:
    print(f"seed {seed}: {Schedule.of(seed)}")
    running[seed].result()


def _run(stock: Stock, schedule: Schedule) -> None:
    arena = Arena(stock, schedule.transports)
    arena.converting = schedule.converting
    try:
        _follow(arena, schedule)
    finally:
        arena.close()


def _follow(arena: Arena, schedule: Schedule) -> None:
    sender = arena.sender(checksum=schedule.checksum, streams=schedule.streams, **HASTY)
    receiver = arena.receiver(streams=schedule.streams, **HASTY)
    peer, proxy = receiver.peer, None
    if schedule.damages:
        proxy, peer = arena.proxy(receiver, *schedule.damages)
    requests = [arena.reserve(sender, receiver, work.count) for work in schedule.work]
    keepers = [
        Keeper(child, [fault for role, fault in schedule.faults if role == child.role])
        for child in (sender, receiver)
    ]
    for request, work in zip(requests, schedule.work, strict=True):
        if not request.outcomes:
            arena.push(request, peer=peer, chunk=work.chunk)
            _end_early(request, work)
    arena.finish(*requests, deadline_s=ROUND_S, of="sender")
    arena.finish(*(request for request in requests if request.sent == "completed"), deadline_s=ROUND_S)
    arena.finish(*requests, deadline_s=ORPHAN_S)
    if proxy is not None:
        arena.drop(proxy)
    survivors = [child for child in (sender, receiver) if _disarmed(child)]
    arena.check(*survivors or [arena.sender("prefill-late"), arena.receiver("decode-late")])
    for keeper in keepers:
        keeper.stop()


def _end_early(request: Request, work: Work) -> None:
    with contextlib.suppress(DiedError):
        if work.end == "abort":
            request.sender.ask("abort", request.lease_id)
        elif work.end == "expire":
            request.receiver.ask("expire", request.lease_id)


def _disarmed(child: Child) -> bool:
    """Disarm a child's faults. Return whether it is alive."""
    try:
        child.ask("arm", [])
    except DiedError:
        return False
    return True
