"""How long steps take by what they compute, learned from every step that runs.

Two linear models: what a step takes that only decodes, and what a prompt's chunks add to it. The latest steps
count most. Those that were measured at the start count little and are never forgotten: they stand for what
has not run lately.

What runs on cores that idle workers lend tells about the worker's own cores too: on `spread` times as many a
step takes spread ** -scaling as long, and the scaling is learned with the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from engine.step.draft import Outcome
from engine.step.nonnegative_fit import NonNegativeFit
from engine.step.sequence import SequenceState
from protocol.costs import StepCosts

MEMORY = 500.0
"""[steps] Over which each model is averaged."""
DECODE_SCALING, PREFILL_SCALING = 0.5, 0.9
"""Until steps on lent cores have told. Decoding waits for memory, which more cores share."""
SCALING_MEMORY = 100.0
"""[steps on lent cores]"""
_MOST_PENDING = 8192
"""Steps that are kept until somebody asks for the costs."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: `rows` sequences that decode and attend to `context` tokens, and `tokens` of
    prompts, whose pairs with the tokens before them are `pairs`.
    """

    rows: int = 0
    context: float = 0.0
    tokens: int = 0
    pairs: float = 0.0


def work_of(sequences: Sequence[SequenceState], counts: Sequence[int]) -> StepWork:
    """Of a step that is about to run. A prompt's last token alone costs as much as a decoded one."""
    rows = context = tokens = 0
    pairs = 0.0
    for sequence, count in zip(sequences, counts, strict=True):
        if count == 1:
            rows += 1
            context += sequence.num_computed
        else:
            tokens += count
            pairs += count * (sequence.num_computed + count / 2)
    return StepWork(rows, context, tokens, pairs)


class _Step(NamedTuple):
    work: StepWork
    seconds: float
    accepted: int = 0
    spread: float = 1.0


class StepTimes:
    """`observe` belongs to the engine's thread; `costs` is for any."""

    def __init__(
        self,
        chunk_tokens: int,
        kv_bytes: int,
        itl_budget_s: float = 0.0,
        kv_windows: tuple[int, ...] = (0,),
    ) -> None:
        self._constants = StepCosts(
            chunk_tokens=chunk_tokens, kv_bytes=kv_bytes, kv_windows=kv_windows, itl_budget_s=itl_budget_s
        )
        self.latest = self._constants
        """What `costs` last answered; costs nothing to read."""
        self._decode, self._prefill = NonNegativeFit(MEMORY), NonNegativeFit(MEMORY)
        self._decode_scaling, self._prefill_scaling = _Scaling(DECODE_SCALING), _Scaling(PREFILL_SCALING)
        self._pending: deque[_Step] = deque(maxlen=_MOST_PENDING)
        self.borrows = False
        """Whether idle workers lend it cores."""
        self._accepted = self._rows = 0.0
        self._error = self._judged = 0.0
        self._lock = threading.Lock()

    def seed(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """What was measured at the start, on the worker's own cores."""
        with self._lock:
            self._learn([_Step(work, seconds) for work, seconds in measured])
            self._decode.keep()
            self._prefill.keep()
            self._error = self._judged = 0.0
        self.costs()

    def observe(
        self, work: StepWork, seconds: float, outcomes: Sequence[Outcome] = (), spread: float = 1.0
    ) -> None:
        """A step that ran on `spread` times the worker's own cores."""
        accepted = sum([outcome.num_accepted for outcome in outcomes])
        self._pending.append(_Step(work, seconds, accepted, spread))

    def costs(self) -> StepCosts:
        with self._lock:
            steps = [self._pending.popleft() for _ in range(len(self._pending))]
            if steps:
                self._judge(steps)
                self._learn(steps)
            step_s, row_s, context_s = self._decode.weights.tolist()
            chunk_s, token_s, attention_s = self._prefill.weights.tolist()
            self.latest = msgspec.structs.replace(
                self._constants,
                step_s=step_s,
                row_s=row_s,
                context_s=context_s,
                chunk_s=chunk_s,
                token_s=token_s,
                attention_s=attention_s,
                decode_scaling=self._decode_scaling.value if self.borrows else 0.0,
                prefill_scaling=self._prefill_scaling.value if self.borrows else 0.0,
                tokens_per_row=1.0 + (self._accepted / self._rows if self._rows else 0.0),
                error=self._error / self._judged if self._judged else 0.0,
            )
            return self.latest

    def _judge(self, steps: Sequence[_Step]) -> None:
        """Compare new steps with what was known before them."""
        fade = (1 - 1 / MEMORY) ** len(steps)
        seconds, spread = _seconds(steps), _spread(steps)
        predicted = self._decode_seconds(steps) * self._decode_scaling.share(spread)
        predicted += _prefill_features(steps) @ self._prefill.weights * self._prefill_scaling.share(spread)
        self._error = fade * self._error + float((np.abs(predicted - seconds) / seconds).sum())
        self._judged = fade * self._judged + len(steps)
        self._accepted = fade * self._accepted + sum(step.accepted for step in steps)
        self._rows = fade * self._rows + sum(step.work.rows for step in steps)

    def _decode_seconds(self, steps: Sequence[_Step]) -> np.ndarray:
        """What decoding in these steps takes on the worker's own cores."""
        seconds: np.ndarray = _decode_features(steps) @ self._decode.weights
        return seconds

    def _learn(self, steps: Sequence[_Step]) -> None:
        plain = [step for step in steps if not step.work.tokens]
        mixed = [step for step in steps if step.work.tokens]
        if plain:
            seconds, spread = _seconds(plain), _spread(plain)
            self._decode_scaling.learn(spread, seconds, self._decode_seconds(plain))
            seconds = seconds / self._decode_scaling.share(spread)
            self._decode.learn(_decode_features(plain), seconds, seconds)
        if mixed:
            seconds, spread = _seconds(mixed), _spread(mixed)
            rest = seconds - self._decode_seconds(mixed) * self._decode_scaling.share(spread)
            features = _prefill_features(mixed)
            self._prefill_scaling.learn(spread, rest, features @ self._prefill.weights)
            share = self._prefill_scaling.share(spread)
            self._prefill.learn(features, rest / share, seconds / share)


class _Scaling:
    """How much sooner steps end on more cores: they take spread ** -scaling as long."""

    def __init__(self, first: float) -> None:
        self.value = first

    def share(self, spread: np.ndarray) -> np.ndarray:
        share: np.ndarray = spread**-self.value
        return share

    def learn(self, spread: np.ndarray, seconds: np.ndarray, on_own_cores: np.ndarray) -> None:
        """Of the steps on lent cores the median counts: a pause of the machine says nothing."""
        useful = (spread > 1) & (seconds > 0) & (on_own_cores > 0)
        count = int(useful.sum())
        if count:
            found = np.log(on_own_cores[useful] / seconds[useful]) / np.log(spread[useful])
            fade = (1 - 1 / SCALING_MEMORY) ** count
            self.value = fade * self.value + (1 - fade) * float(np.clip(np.median(found), 0, 1))


def _seconds(steps: Sequence[_Step]) -> np.ndarray:
    return np.array([step.seconds for step in steps])


def _spread(steps: Sequence[_Step]) -> np.ndarray:
    return np.array([step.spread for step in steps])


def _decode_features(steps: Sequence[_Step]) -> np.ndarray:
    return np.array([(1.0, step.work.rows, step.work.context) for step in steps])


def _prefill_features(steps: Sequence[_Step]) -> np.ndarray:
    works = [step.work for step in steps]
    return np.array([(float(work.tokens > 0), work.tokens, work.pairs) for work in works])
