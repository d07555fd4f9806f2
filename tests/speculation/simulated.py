"""Simulates a server with known step times and known acceptance of each drafted token.

A drafter's confidence in a token is right: the token is accepted as often. The machine resembles a two-core
EPYC that serves the bundled model. Its clock runs only during steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import log

import pytest

from costs.widths import MeasuredCurve, TargetTime
from engine.step.draft import Draft
from protocol.speculation import Method
from speculation.control import estimator
from speculation.control.controller import DraftController
from speculation.control.request import Shape, SpeculatingRequest

Rate = Callable[[int, int], float]
"""Maps (request's number, its tokens so far) to the chance that a drafted token is accepted if those before
it were.
"""

ROWS = [1 << power for power in range(10)]
PROMPT = 500
PREFILL = 5e-5
SPREAD = 3.0
"""How alike the tokens of a passage are in their chances, as the sum of a beta distribution's parameters."""
CAPTURE = 0.15
"""The share that reading a prompt for heads adds to its prefill."""


def target_seconds(num_sequences: int, rows: float) -> float:
    """Return a step's time for a small model on a CPU: sequences and rows cost time, more in larger
    batches.
    """
    drafted = rows - num_sequences
    return (
        3e-4 + 2.2e-4 * num_sequences + 2e-4 * min(drafted, 1) + (1.9e-4 - 1.1e-4 / num_sequences) * drafted
    )


def flat_seconds(num_sequences: int, rows: float) -> float:
    """Return a step's time on an accelerator: rows are free until arithmetic takes longer than reading the
    weights.
    """
    return max(8e-3, 8e-3 * rows / 96)


@dataclass(frozen=True)
class Profile:
    """A method: its costs in seconds, its acceptance in hard and easy text, and how often it finds
    a draft.
    """

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
    is_confident: bool = True
    ends_chains: bool = False
    """Whether drafting stops where the next token is too unlikely to be accepted."""

    @property
    def shape(self) -> Shape:
        return Shape(self.whole, whole=True) if self.whole else Shape(self.max_tokens)


PROFILES = [
    Profile(
        "draft_model",
        0.97,
        0.5,
        start=1.2e-4,
        per_level=1e-5,
        per_token=1.2e-5,
        per_read=5e-6,
        ends_chains=True,
    ),
    Profile("ngram", 0.97, 0.3, share=0.6, per_token=1e-6, start=5e-6),
    Profile("suffix", 0.95, 0.4, share=0.8, per_token=2e-6, start=2e-5),
    Profile(
        "lookahead",
        0.92,
        0.3,
        share=0.9,
        start=2e-5,
        per_token=5e-7,
        max_tokens=3,
        whole=30,
        is_confident=False,
    ),
    Profile(
        "medusa", 0.55, 0.3, start=1.5e-4, per_level=1e-5, per_token=1e-5, max_tokens=3, is_confident=False
    ),
    Profile(
        "eagle", 0.93, 0.4, start=1e-4, per_level=2e-5, per_token=1.2e-5, reads_prompts=True, ends_chains=True
    ),
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
    """Keeps `num_requests` running, each with a prompt and `output_tokens`. A `fixed` of None means
    "auto".
    """

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
            controller.plan([running.request for running in self.running])
            self._take(self.overhead * len(self.running))
        joining, self._waiting = self._waiting[:1], self._waiting[1:]
        self._decode()
        for running in joining:
            self._prefill(running)
        self.running += joining

    def _prefill(self, running: Running) -> None:
        """Prefill a prompt beside the step."""
        if self.controller.estimator.window is not None:
            self.controller.estimator.window.is_clean = False
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
        drafts = [self._draft(running) for running in self.running]
        if any(rooms):
            self._charge(drafts)
        counts = [len(draft) for draft in drafts]
        if self.fixed is None and self.profile.is_confident and any(rooms):
            judged = [number for number, draft in enumerate(drafts) if draft]
            told = [
                (request := self.running[number].request, _as_draft(drafts[number], request))
                for number in judged
            ]
            admitted = self.controller.admit(self.profile.method, told) if told else []
            for number, count in zip(judged, admitted, strict=True):
                counts[number] = count
        self._take(self.target(len(rooms), len(rooms) + sum(counts)))
        for running, room, draft, count in zip(list(self.running), rooms, drafts, counts, strict=True):
            self._verify(running, room, draft, count)

    def _draft(self, running: Running) -> list[float]:
        """Return the chance of each token that is drafted, if those before it are accepted."""
        request, profile = running.request, self.profile
        request.confidences = ()
        if self._random.random() >= profile.share:
            return []
        chances: list[float] = []
        survival = 1.0
        calibration = self.controller.estimator.methods[profile.method].calibration
        while len(chances) < request.granted and (survival >= calibration.floor or not profile.ends_chains):
            chances.append(self._chance(running, len(chances)))
            survival *= calibration.rate(log_odds(chances[-1]))
        return chances

    def _charge(self, drafts: list[list[float]]) -> None:
        drafting = [running.request for running in self.running if running.request.granted]
        profile = self.profile
        counts = [len(draft) for draft in drafts] if profile.ends_chains else self.chosen
        levels = 1 if profile.whole else max(counts)
        seconds = profile.start + profile.per_level * levels + profile.per_token * sum(counts)
        seconds += profile.per_read * sum(request.unread for request in drafting)
        charged = [count for count, room in zip(counts, self.chosen, strict=True) if room]
        self.controller.estimator.drafted(profile.method, drafting, charged, self._take(seconds))

    def _verify(self, running: Running, room: int, draft: list[float], num_verified: int) -> None:
        depth = min(num_verified, self.profile.max_tokens)
        num_accepted = 0
        while num_accepted < depth and self._random.random() < draft[num_accepted]:
            num_accepted += 1
        self.tokens += 1 + num_accepted
        running.place += 1 + num_accepted
        if room:
            request = running.request
            is_blind = request.is_blind
            self.controller.estimator.verified(request, num_verified, depth, num_accepted, is_blind=is_blind)
        if running.place >= self.output_tokens:
            self.running.remove(running)
            self._waiting.append(self._start())
            self.controller.estimator.ended(PROMPT, running.place)

    def _chance(self, running: Running, drafted: int) -> float:
        place = running.place + drafted
        if self.rate is not None:
            chance = self.rate(running.number, place)
        else:
            chance = self.profile.easy if text(running.number, place) else self.profile.hard
        chance *= 0.3 if running.request.is_blind else 1
        return self._random.betavariate(SPREAD * chance, SPREAD * (1 - chance))

    def _take(self, seconds: float) -> float:
        """Let time pass. Return the part of it that the controller sees."""
        self.seconds += seconds
        seen = seconds * self._random.lognormvariate(0, self.noise)
        seen *= 10 if self._random.random() < self.outliers else 1
        self.clock += seen
        return seen


def log_odds(chance: float) -> float:
    return log(max(chance, 1e-6) / max(1 - chance, 1e-6))


def _as_draft(chances: list[float], request: SpeculatingRequest) -> Draft:
    confidences = [log_odds(chance) for chance in chances]
    return Draft([0] * len(chances), confidences=confidences, is_blind=request.is_blind)
