"""Simulates decode workers that share a draft worker, token by token.

The draft worker drafts ahead for each of its requests, up to the useful length. Once it hears of a rejected
token it starts the draft again. Reports to the router contain small errors.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.placement.drafts.prospects import NOWHERE, DraftFacts, DraftPlace, DraftTarget, Prospects, decide
from tests.router.drafted import drafter, speculation

SWEEP_S = 0.25
NOISE = 0.01


@dataclass(frozen=True)
class Machine:
    """Costs: a target's step takes `start_s` and `row_s` for each row, its own drafts `level_s` for each
    level and `token_s` for each token. A draft worker's step takes `draft_s` and `draft_row_s` for each row,
    and a message takes `wire_s`.
    """

    start_s: float = 20e-3
    row_s: float = 0.15e-3
    level_s: float = 1e-3
    token_s: float = 0.02e-3
    draft_s: float = 0.8e-3
    draft_row_s: float = 0.01e-3
    wire_s: float = 0.5e-3
    rate: float = 0.8

    def local_s(self, rows: int, count: int) -> float:
        """Return the time of a target's step with its own drafts."""
        return (
            self.start_s
            + self.row_s * rows * (1 + count)
            + (self.level_s * count + self.token_s * rows * count if count else 0.0)
        )


@functools.cache
def best_count(machine: Machine, rows: int, *, at_once: bool = False) -> int:
    """Return the tokens that the worker's control would draft; with `at_once` in no time."""
    tokens = [sum(machine.rate**i for i in range(count + 1)) for count in range(9)]
    seconds = [
        machine.start_s + machine.row_s * rows * (1 + count) if at_once else machine.local_s(rows, count)
        for count in range(9)
    ]
    return max(range(9), key=lambda count: tokens[count] / seconds[count])


@dataclass(eq=False)
class Chain:
    """A request with `committed` tokens. The draft worker knows `known` of them and has drafted `ahead` more,
    of which the first `good` are right. `sent` is the same triple for its last message.
    """

    place: DraftPlace = NOWHERE
    committed: int = 0
    known: int = 0
    ahead: int = 0
    good: int = 0
    verifies: int = 0
    sent: tuple[int, int, int] = (0, 0, 0)


@dataclass(eq=False)
class SimulatedTarget:
    chains: list[Chain]
    place: DraftPlace | None = None
    tokens: int = 0
    changes: int = 0


@dataclass
class Drafting:
    """A simulated group of targets with one draft worker. If `plan` is None, the router decides."""

    machine: Machine
    loads: tuple[int, ...]
    plan: DraftPlace | None = None
    seed: int = 1
    now: float = 0.0
    targets: list[SimulatedTarget] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._is_drafting = False
        self.targets = [SimulatedTarget([Chain() for _ in range(load)]) for load in self.loads]
        self._sweep()
        for target in self.targets:
            self._begin_step(target)

    def run(self, seconds: float) -> float:
        """Return all targets' tokens per second over this further time."""
        before, end = sum(target.tokens for target in self.targets), self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end
        return (sum(target.tokens for target in self.targets) - before) / seconds

    def resize(self, loads: tuple[int, ...]) -> None:
        """Run these numbers of requests on the targets from now on."""
        for target, load in zip(self.targets, loads, strict=True):
            kept = target.chains[:load]
            target.chains[:] = kept + [Chain() for _ in range(load - len(kept))]

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ties), event))

    # --- targets ------------------------------------------------------------------------------------

    def _begin_step(self, target: SimulatedTarget) -> None:
        machine, rows = self.machine, len(target.chains)
        place = target.place or NOWHERE
        if place.where == "local":
            best = best_count(machine, rows) if self.plan is None else place.max_tokens
            count = min(best, place.max_tokens)
            for chain in target.chains:
                chain.verifies = count
            seconds = machine.local_s(rows, count)
        else:
            most = self._most(target)
            for chain in target.chains:
                chain.verifies = min(max(self._lead(chain)[0], 0), most)
            drafted = sum(chain.verifies for chain in target.chains)
            seconds = machine.start_s + machine.row_s * (rows + drafted)
        self._at(seconds, lambda: self._end_step(target))

    def _most(self, target: SimulatedTarget) -> int:
        """Return the length of drafts that are made elsewhere."""
        place = target.place or NOWHERE
        best = best_count(self.machine, len(target.chains), at_once=True)
        return place.max_tokens if self.plan is not None else min(best, place.max_tokens)

    def _lead(self, chain: Chain) -> tuple[int, int]:
        """Return how many tokens of the latest draft are not committed, and how many are right."""
        known, ahead, good = chain.sent
        since = chain.committed - known
        return (ahead - since, good - since) if since <= good else (0, 0)

    def _end_step(self, target: SimulatedTarget) -> None:
        place = target.place or NOWHERE
        for chain in target.chains:
            right = self._lead(chain)[1] if place.at is not None else chain.verifies
            accepted = 0
            while accepted < min(chain.verifies, right):
                if place.at is None and self._random.random() >= self.machine.rate:
                    break
                accepted += 1
            chain.committed += accepted + 1
            target.tokens += accepted + 1
        if place.at is not None:
            news = [(chain, chain.committed) for chain in target.chains]
            self._at(self.machine.wire_s, lambda: self._hear(news))
        self._begin_step(target)

    # --- the draft worker ---------------------------------------------------------------------------

    def _hear(self, news: list[tuple[Chain, int]]) -> None:
        for chain, committed in news:
            since = committed - chain.known
            chain.known = committed
            agrees = since <= chain.good
            chain.ahead, chain.good = (chain.ahead - since, chain.good - since) if agrees else (0, 0)
        self._draft()

    def _draft(self) -> None:
        wanting: list[Chain] = []
        for target in self.targets:
            if target.place is not None and target.place.at is not None:
                most = 2 * self._most(target)
                wanting += [chain for chain in target.chains if chain.ahead <= most]
        if self._is_drafting or not wanting:
            return
        self._is_drafting = True
        begun = [(chain, chain.known, chain.ahead) for chain in wanting]
        seconds = self.machine.draft_s + self.machine.draft_row_s * len(wanting)
        self._at(seconds, lambda: self._end_draft(begun))

    def _end_draft(self, begun: list[tuple[Chain, int, int]]) -> None:
        self._is_drafting = False
        sent = []
        for chain, known, ahead in begun:
            if chain.known + chain.ahead != known + ahead:
                continue  # contradicted meanwhile
            if chain.good == chain.ahead and self._random.random() < self.machine.rate:
                chain.good += 1
            chain.ahead += 1
            sent.append((chain, (chain.known, chain.ahead, chain.good)))
        self._at(self.machine.wire_s, lambda: self._arrive(sent))
        self._draft()

    @staticmethod
    def _arrive(sent: list[tuple[Chain, tuple[int, int, int]]]) -> None:
        for chain, draft in sent:
            chain.sent = draft

    # --- the router ---------------------------------------------------------------------------------

    def _sweep(self) -> None:
        for target in self.targets:
            place = self.plan if self.plan is not None else self._decided(target)
            if place != target.place:
                target.changes += target.place is not None
                target.place = place
                for chain in target.chains:
                    chain.known, chain.ahead, chain.good = chain.committed, 0, 0
        self._draft()
        self._at(SWEEP_S, self._sweep)

    def _decided(self, target: SimulatedTarget) -> DraftPlace:
        machine = self.machine
        elsewhere = [other for other in self.targets if other is not target and other.place is not None]
        others = sum(len(other.chains) for other in elsewhere if other.place and other.place.at)
        noise = [self._random.lognormvariate(0, NOISE) for _ in range(5)]
        known = speculation(
            machine.start_s * noise[0],
            machine.row_s * noise[1],
            rate=min(machine.rate * noise[2], 1.0),
            level_s=machine.level_s * noise[3],
            token_s=machine.token_s,
        )
        shared = drafter(
            step_s=machine.draft_s * noise[4],
            row_s=machine.draft_row_s,
            others=others,
            answer_s=2 * machine.wire_s + machine.start_s + machine.draft_s,
        )
        at = DraftTarget(rows=len(target.chains), speculation=known, method="draft_model")
        return decide(DraftFacts(current=target.place), Prospects(at, [shared])).place


def fixed_plans() -> list[DraftPlace]:
    local = [DraftPlace("draft_model", count) for count in (2, 4, 8)]
    remote = [DraftPlace("draft_model", count, "draft-0") for count in (1, 2, 4, 8)]
    return [NOWHERE, *local, *remote]
