"""How long steps take by what they compute, learned from every step that runs.

Two linear models: what a step takes that only decodes, and what a prompt's chunks add to it. The latest steps
count most. Those that were measured at the start count little and are never forgotten: they stand for what
has not run lately.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from engine.draft import Outcome
from engine.sequence import SequenceState
from protocol.costs import StepCosts

MEMORY = 500.0
"""[steps] Over which each model is averaged."""
SEED_WEIGHT = 0.1
"""[steps] Of each step that was measured at the start."""
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


class StepTimes:
    """`observe` belongs to the engine's thread; `costs` is for any."""

    def __init__(
        self, chunk_tokens: int, kv_bytes: int, itl_budget_s: float = 0.0, memory: float = MEMORY
    ) -> None:
        self._constants = StepCosts(chunk_tokens=chunk_tokens, kv_bytes=kv_bytes, itl_budget_s=itl_budget_s)
        self._memory = memory
        self.latest = self._constants
        """What `costs` last answered; costs nothing to read."""
        self._decode, self._prefill = _Fit(memory), _Fit(memory)
        self._pending: deque[tuple[StepWork, float, int]] = deque(maxlen=_MOST_PENDING)
        self._accepted = self._rows = 0.0
        self._error = self._judged = 0.0
        self._lock = threading.Lock()

    def seed(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """What was measured at the start."""
        with self._lock:
            self._learn([(work, seconds, 0) for work, seconds in measured])
            self._decode.keep()
            self._prefill.keep()
            self._error = self._judged = 0.0
        self.costs()

    def observe(self, work: StepWork, seconds: float, outcomes: Sequence[Outcome] = ()) -> None:
        accepted = sum([outcome.num_accepted for outcome in outcomes])
        self._pending.append((work, seconds, accepted))

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
                tokens_per_row=1.0 + (self._accepted / self._rows if self._rows else 0.0),
                error=self._error / self._judged if self._judged else 0.0,
            )
            return self.latest

    def _judge(self, steps: Sequence[tuple[StepWork, float, int]]) -> None:
        """Compare new steps with what was known before them."""
        fade = (1 - 1 / self._memory) ** len(steps)
        seconds = np.array([step[1] for step in steps])
        errors = np.abs(self._predict([step[0] for step in steps]) - seconds) / seconds
        self._error = fade * self._error + float(errors.sum())
        self._judged = fade * self._judged + len(steps)
        self._accepted = fade * self._accepted + sum(step[2] for step in steps)
        self._rows = fade * self._rows + sum(step[0].rows for step in steps)

    def _predict(self, works: Sequence[StepWork]) -> np.ndarray:
        decode, prefill = _decode_features(works), _prefill_features(works)
        predicted: np.ndarray = decode @ self._decode.weights + prefill @ self._prefill.weights
        return predicted

    def _learn(self, steps: Sequence[tuple[StepWork, float, int]]) -> None:
        plain = [step for step in steps if not step[0].tokens]
        mixed = [step for step in steps if step[0].tokens]
        if plain:
            seconds = np.array([step[1] for step in plain])
            self._decode.learn(_decode_features([step[0] for step in plain]), seconds, seconds)
        if mixed:
            seconds = np.array([step[1] for step in mixed])
            works = [step[0] for step in mixed]
            rest = seconds - _decode_features(works) @ self._decode.weights
            self._prefill.learn(_prefill_features(works), rest, seconds)


def _decode_features(works: Sequence[StepWork]) -> np.ndarray:
    return np.array([(1.0, work.rows, work.context) for work in works])


def _prefill_features(works: Sequence[StepWork]) -> np.ndarray:
    return np.array([(float(work.tokens > 0), work.tokens, work.pairs) for work in works])


class _Fit:
    """Least squares of relative errors, of three weights that are never negative."""

    def __init__(self, memory: float) -> None:
        self._fade = 1 - 1 / memory
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self._kept_squares, self._kept_products = np.zeros((3, 3)), np.zeros(3)
        self.weights = np.zeros(3)

    def learn(self, features: np.ndarray, values: np.ndarray, scale: np.ndarray) -> None:
        """Of steps, oldest first. Errors count relative to `scale`: a pause of the machine counts little."""
        scale = np.maximum(scale, 1e-9)
        age = self._fade ** np.arange(len(features) - 1, -1, -1)
        rows = features / scale[:, None]
        fade = self._fade ** len(features)
        self._squares = fade * self._squares + (rows * age[:, None]).T @ rows
        self._products = fade * self._products + (rows * age[:, None]).T @ (values / scale)
        self._solve()

    def keep(self) -> None:
        """Never forget what was learned so far."""
        self._kept_squares, self._kept_products = SEED_WEIGHT * self._squares, SEED_WEIGHT * self._products
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)

    def _solve(self) -> None:
        """Of all choices of weights that are zero the one that fits best, if none is negative."""
        squares, products = self._squares + self._kept_squares, self._products + self._kept_products
        sizes = np.sqrt(np.maximum(np.diag(squares), 1e-30))
        squares, products = squares / np.outer(sizes, sizes) + 1e-9 * np.eye(3), products / sizes
        best, gain = np.zeros(3), 0.0
        for count in (1, 2, 3):
            for chosen in itertools.combinations(range(3), count):
                part = list(chosen)
                found = np.linalg.solve(squares[np.ix_(part, part)], products[part])
                if (found >= 0).all() and float(found @ products[part]) > gain:
                    gain = float(found @ products[part])
                    best = np.zeros(3)
                    best[part] = found
        self.weights = best / sizes
