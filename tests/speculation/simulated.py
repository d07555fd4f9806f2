"""Simulates a server with known step times and known acceptance of each drafted token.

The machine resembles a two-core EPYC that serves the bundled model. Its clock runs only during steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest

from costs.widths import MeasuredCurve, TargetTime
from protocol.speculation import Method
from speculation.control import estimator
from speculation.control.controller import DraftController
from speculation.control.estimator import Shape, SpeculatingRequest

Rate = Callable[[int, int], float]
"""Maps (request number, its tokens so far) to the chance that the next drafted token is accepted."""

ROWS = [1 << power for power in range(10)]
PROMPT = 500
PREFILL = 5e-5
CAPTURE = 0.15
"""The share that reading a prompt for heads adds to its prefill."""


def target_seconds(num_sequences: int, rows: float) -> float:
    """Return a step's time for a small model on a CPU: rows cost more in larger batches."""
    drafted = rows - num_sequences
    return (
        3e-4 + 2.2e-4 * num_sequences + 2e-4 * min(drafted, 1) + (1.9e-4 - 1.1e-4 / num_sequences) * drafted
    )


def flat_seconds(num_sequences: int, rows: float) -> float:
    """Return a step's time on an accelerator: rows are free until arithmetic dominates."""
    return max(8e-3, 8e-3 * rows / 96)


@dataclass(frozen=True)
class Profile:
    """A method: its costs in seconds, its acceptance in hard and easy text, how often it finds drafts."""

    method: Method
    easy: float
    hard: float
    share: float = 1.0
    start: float = 0.0
    per_level: float = 0.0
    per_token: float = 0.0
    per_read: float = 0.0
    max_tokens: int = 8
    whole: int = 0
    reads_prompts: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.whole, whole=True) if self.whole else Shape(self.max_tokens)


PROFILES = [
    Profile("draft_model", 0.97, 0.5, start=1.2e-4, per_level=1e-5, per_token=1.2e-5, per_read=5e-6),
    Profile("ngram", 0.97, 0.3, share=0.6, per_token=1e-6, start=5e-6),
    Profile("suffix", 0.95, 0.4, share=0.8, per_token=2e-6, start=2e-5),
    Profile("lookahead", 0.92, 0.3, share=0.9, start=2e-5, per_token=5e-7, max_tokens=3, whole=30),
    Profile("medusa", 0.55, 0.3, start=1.5e-4, per_level=1e-5, per_token=1e-5, max_tokens=3),
    Profile("eagle", 0.93, 0.4, start=1e-4, per_level=2e-5, per_token=1.2e-5, reads_prompts=True),
]


def text(number: int, place: int) -> bool:
    """Tell whether a request's text is easy at a place: seldom at the beginning, then in long passages."""
    return _ease(number, place // 24) < (0.4 if place < 48 else 0.9)


@cache
def _ease(number: int, passage: int) -> float:
    return random.Random(f"{number} {passage}").random()


@dataclass(eq=False)
class Running:
    number: int
    request: SpeculatingRequest
    place: int = 0


@dataclass(eq=False)
class SimulatedServer:
    """Keeps `num_requests` running, each with `output_tokens`. A `fixed` of None means "auto"."""

    patch: pytest.MonkeyPatch
    num_requests: int
    profile: Profile
    rate: Rate | None = None
    target: Callable[[int, float], float] = target_seconds
    noise: float = 0.05
    outliers: float = 0.005
    fixed: int | None = None
    output_tokens: int = 128
    calibrated: Callable[[int], float] | None = None
    """The costs measured at the start, if they differ from `target`."""
    overhead: float = 1e-5
    """The time of planning for one request."""
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """The elapsed time without noise. The controller sees `clock`."""
    clock: float = 0.0
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.patch.setattr(estimator.time, "perf_counter", lambda: self.clock)
        profile = self.profile
        self.controller = DraftController(self.num_requests, profile.shape.max_tokens)
        measured = self.calibrated or (lambda rows: self.target(1, rows))
        self.controller.estimator.target = TargetTime(
            MeasuredCurve(ROWS, [measured(rows) for rows in ROWS], PREFILL)
        )
        self.controller.estimator.add_method(
            profile.method,
            profile.shape,
            profile.max_tokens,
            reads_text=profile.reads_prompts or profile.per_read > 0,
            reads_prompts=profile.reads_prompts,
        )
        self._started = 1000 * self.seed
        self.running: list[Running] = []
        self._waiting = [self._start() for _ in range(self.num_requests)]

    def _start(self) -> Running:
        self._started += 1
        request = self.controller.estimator.new_request(self.profile.method, self.fixed)
        return Running(self._started, request)

    def run(self, seconds: float) -> float:
        """Return the tokens per second over this further time."""
        tokens, started = self.tokens, self.seconds
        while self.seconds < started + seconds:
            self.step()
        return (self.tokens - tokens) / (self.seconds - started)

    def step(self) -> None:
        controller = self.controller
        if self.fixed != 0 and controller.begin_step(len(self.running), len(self._waiting)):
            for running in self.running:
                running.request.place = running.place
            controller.plan([running.request for running in self.running])
            self._take(self.overhead * len(self.running))
        joining, self._waiting = self._waiting[:1], self._waiting[1:]
        self._decode()
        for running in joining:
            self._prefill(running)
        self.running += joining

    def _prefill(self, running: Running) -> None:
        """Prefill a prompt beside the step."""
        self.controller.estimator.disturb()
        running.request.unread = PROMPT if self.profile.per_read else 0
        seconds = PREFILL * PROMPT
        if self.profile.reads_prompts and self.fixed != 0:
            if self.fixed or self.controller.reads_prompts(self.profile.method, PROMPT):
                seconds *= 1 + CAPTURE
            else:
                running.request.is_blind = True
        self._take(seconds)
        self.tokens += 1
        running.place = 1

    def _decode(self) -> None:
        rooms = [running.request.granted for running in self.running]
        self.chosen = rooms
        if not rooms:
            return
        drafted = [room if self._random.random() < self.profile.share else 0 for room in rooms]
        if any(rooms):
            self._draft(rooms)
        rows = len(rooms) + sum(drafted)
        self._take(self.target(len(rooms), rows))
        for running, room, num_drafted in zip(list(self.running), rooms, drafted, strict=True):
            self._verify(running, room, num_drafted)

    def _draft(self, rooms: list[int]) -> None:
        drafting = [running.request for running in self.running if running.request.granted]
        profile = self.profile
        levels = 1 if profile.whole else max(rooms)
        seconds = profile.start + profile.per_level * levels + profile.per_token * sum(rooms)
        seconds += profile.per_read * sum(request.unread for request in drafting)
        counts = [request.granted for request in drafting]
        self.controller.estimator.drafted(profile.method, drafting, counts, self._take(seconds))

    def _verify(self, running: Running, room: int, num_drafted: int) -> None:
        depth = min(num_drafted, self.profile.max_tokens)
        num_accepted = 0
        while num_accepted < depth and self._accepts(running, num_accepted):
            num_accepted += 1
        self.tokens += 1 + num_accepted
        running.place += 1 + num_accepted
        if room:
            self.controller.estimator.verified(running.request, room, num_drafted)
            running.request.acceptance.observe(depth, num_accepted, running.place)
        if running.place >= self.output_tokens:
            self.running.remove(running)
            self._waiting.append(self._start())
            self.controller.estimator.ended(PROMPT, running.place)

    def _accepts(self, running: Running, drafted: int) -> bool:
        place = running.place + drafted
        if self.rate is not None:
            chance = self.rate(running.number, place)
        else:
            chance = self.profile.easy if text(running.number, place) else self.profile.hard
        return self._random.random() < (0.3 * chance if running.request.is_blind else chance)

    def _take(self, seconds: float) -> float:
        """Let time pass. Return the part of it that the controller sees."""
        self.seconds += seconds
        seen = seconds * self._random.lognormvariate(0, self.noise)
        seen *= 10 if self._random.random() < self.outliers else 1
        self.clock += seen
        return seen
