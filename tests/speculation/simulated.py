"""An engine of which all is known: what steps take, and how likely each drafted token is to be accepted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.speculation import Method
from speculation.control.acceptance import Acceptance, MethodAcceptance
from speculation.control.controller import Controller, MethodControl
from speculation.control.plan import Request, Shape
from speculation.control.step_time import DraftTime, DraftTimes, TargetTime, TargetTimes

METHOD: Method = "draft_model"
MAX_TOKENS = 8
CONTEXT = 200.0
SURROUNDINGS = 3e-4
DRAFT = DraftTimes(per_level=6e-4, per_token=4e-5)
ROWS = [1 << power for power in range(10)]

Rate = Callable[[int, int], float]
"""(request's number, its tokens so far) -> chance that a drafted token is accepted after those before it."""


def target_seconds(rows: int) -> float:
    """Of a small model on a CPU: every row costs."""
    return 2e-3 + 2.5e-4 * rows


def flat_seconds(rows: int) -> float:
    """Of an accelerator: rows are free until the arithmetic takes longer than reading the weights."""
    return max(8e-3, 8e-3 * rows / 96)


@dataclass(eq=False)
class Running:
    number: int
    request: Request
    place: int = 0


@dataclass(eq=False)
class SimulatedEngine:
    """`share` is the part of the requests' drafts that the drafter finds. The clock of `seconds` has neither
    the noise nor the outliers that the controller sees.
    """

    num_requests: int
    rate: Rate
    target: Callable[[int], float] = target_seconds
    draft: DraftTimes = DRAFT
    share: float = 1.0
    noise: float = 0.05
    outliers: float = 0.01
    fixed: int | None = None
    output_tokens: int = 300
    calibrated: Callable[[int], float] | None = None
    """What calibration made of `target`, if not the truth."""
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(5)
        measured = self.calibrated or self.target
        times = TargetTimes(ROWS, [measured(rows) for rows in ROWS])
        max_rows = self.num_requests * (1 + MAX_TOKENS)
        self.controller = Controller(TargetTime(times, max_rows), self.num_requests)
        self.method = MethodControl(Shape(MAX_TOKENS), MethodAcceptance(MAX_TOKENS), DraftTime(self.draft))
        self.controller.methods[METHOD] = self.method
        self._started = 0
        self.running = [self._start() for _ in range(self.num_requests)]
        for index, running in enumerate(self.running):  # not all at the same place
            running.place = index * self.output_tokens // self.num_requests

    def _start(self) -> Running:
        self._started += 1
        request = Request(METHOD, self.fixed, Acceptance(self.method.acceptance))
        self.controller.expect(request)
        return Running(self._started, request)

    def run(self, steps: int) -> float:
        """Tokens a second over so many steps more."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def step(self) -> None:
        requests = [running.request for running in self.running]
        for running in self.running:
            running.request.place = running.place
        if self.controller.is_due(len(requests)):
            self.controller.choose(requests, CONTEXT)
        rooms = [request.chosen for request in requests]
        self.chosen = rooms
        drafted = [room if self._random.random() < self.share else 0 for room in rooms]
        self._take_time(self.num_requests + sum(drafted), rooms)
        for index, num_drafted in enumerate(drafted):
            self._verify(index, rooms[index], num_drafted)
        self.steps += 1

    def _take_time(self, rows: int, rooms: list[int]) -> None:
        levels, tokens = max(rooms), sum(rooms)
        drafting = self.draft.start + self.draft.per_level * levels + self.draft.per_token * tokens
        drafting = drafting if levels else 0.0
        self.seconds += self.target(rows) + drafting + SURROUNDINGS
        slow = self._random.lognormvariate(0, self.noise)
        slow *= 10 if self._random.random() < self.outliers else 1
        if self.controller.is_watched or (levels and self.controller.is_steady):
            self.controller.observe_step(self.num_requests, rows, CONTEXT, self.target(rows) * slow)
            self.controller.surroundings.observe(self.num_requests, levels > 0, SURROUNDINGS * slow)
        if levels:
            self.method.time.observe(levels, tokens, 0, drafting * slow)

    def _verify(self, index: int, room: int, num_drafted: int) -> None:
        running = self.running[index]
        num_accepted = 0
        while num_accepted < num_drafted and self._accepts(running, num_accepted):
            num_accepted += 1
        self.tokens += 1 + num_accepted
        running.place += 1 + num_accepted
        acceptance = running.request.acceptance
        if room:
            acceptance.observe_share(room, num_drafted)
        if num_drafted:
            acceptance.observe(num_drafted, num_accepted, running.place)
        if running.place >= self.output_tokens:
            self.running[index] = self._start()

    def _accepts(self, running: Running, drafted: int) -> bool:
        return self._random.random() < self.rate(running.number, running.place + drafted)
