"""How long a worker's steps take by what they compute, learned from every step that runs.

The latest steps count most. Those that were measured at the start count little and are never forgotten: they
stand for what has not run lately.

Steps on cores that idle workers lend tell about the worker's own cores too: on `spread` times as many a step
takes spread ** -scaling as long, and the scaling is learned with the rest.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from protocol.costs import StepCosts

MEMORY = 500.0
"""[steps] The memory of the model, for steps that only decode and for those that compute prompts."""
DECODE_SCALING, PREFILL_SCALING = 0.5, 0.9
"""Assumed until steps on lent cores have run. Decoding waits for memory, which more cores share."""
SCALING_MEMORY = 100.0
"""[steps on lent cores]"""
_MOST_PENDING = 8192
"""Steps that are kept until somebody asks for the costs."""
_DECODE, _PROMPT = slice(0, 3), slice(3, 6)
"""The features of decoding rows, and those of a prompt's chunks."""


class ComputedSequence(Protocol):
    """A sequence of which `num_computed` tokens are computed."""

    num_computed: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step: `rows` sequences that decode and attend to `context` tokens, and `tokens` of
    prompts, whose pairs with the tokens before them are `pairs`.
    """

    rows: int = 0
    context: float = 0.0
    tokens: int = 0
    pairs: float = 0.0


def work_of(sequences: Sequence[ComputedSequence], counts: Sequence[int]) -> StepWork:
    """Return the work of a step that is about to run. A prompt's last token alone costs as much as a decoded
    one.
    """
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
    """Learns a worker's costs. `observe` belongs to the engine's thread; `costs` is for any."""

    def __init__(
        self,
        chunk_tokens: int,
        kv_bytes: int,
        itl_budget_s: float = 0.0,
        kv_windows: tuple[int, ...] = (0,),
    ) -> None:
        self.latest = StepCosts(
            chunk_tokens=chunk_tokens, kv_bytes=kv_bytes, kv_windows=kv_windows, itl_budget_s=itl_budget_s
        )
        """The latest answer of `costs`; costs nothing to read."""
        self._model = Regression(6, MEMORY, num_kinds=2)
        self._decode_scaling, self._prefill_scaling = _Scaling(DECODE_SCALING), _Scaling(PREFILL_SCALING)
        self._pending: deque[_Step] = deque(maxlen=_MOST_PENDING)
        self.borrows = False
        """Whether idle workers lend it cores."""
        self._accepted = self._rows = 0.0
        self._error = self._judged = 0.0
        self._lock = threading.Lock()

    def seed(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """Learn from steps measured at the start, on the worker's own cores."""
        with self._lock:
            self._learn([_Step(work, seconds) for work, seconds in measured])
            self._model.keep()
        self.costs()

    def observe(self, work: StepWork, seconds: float, accepted: int = 0, spread: float = 1.0) -> None:
        """Note a step that ran on `spread` times the worker's own cores and accepted so many drafted
        tokens.
        """
        self._pending.append(_Step(work, seconds, accepted, spread))

    def costs(self) -> StepCosts:
        with self._lock:
            steps = [self._pending.popleft() for _ in range(len(self._pending))]
            if steps:
                self._judge(steps)
                self._learn(steps)
            names = "step_s", "row_s", "context_s", "chunk_s", "token_s", "attention_s"
            self.latest = msgspec.structs.replace(
                self.latest,
                **dict(zip(names, self._model.weights.tolist(), strict=True)),
                decode_scaling=self._decode_scaling.value if self.borrows else 0.0,
                prefill_scaling=self._prefill_scaling.value if self.borrows else 0.0,
                tokens_per_row=1.0 + (self._accepted / self._rows if self._rows else 0.0),
                error=self._error / self._judged if self._judged else 0.0,
            )
            return self.latest

    def _judge(self, steps: Sequence[_Step]) -> None:
        """Compare new steps with what was known before them."""
        fade = (1 - 1 / MEMORY) ** len(steps)
        features, seconds, spread = _columns(steps)
        predicted = (features * self._shares(spread)) @ self._model.weights
        self._error = fade * self._error + float((np.abs(predicted - seconds) / seconds).sum())
        self._judged = fade * self._judged + len(steps)
        self._accepted = fade * self._accepted + sum(step.accepted for step in steps)
        self._rows = fade * self._rows + sum(step.work.rows for step in steps)

    def _learn(self, steps: Sequence[_Step]) -> None:
        features, seconds, spread = _columns(steps)
        own = features * self._model.weights
        decode_s, prompt_s = own[:, _DECODE].sum(axis=1), own[:, _PROMPT].sum(axis=1)
        is_plain = features[:, 3] == 0
        rest = seconds - decode_s * self._decode_scaling.share(spread)
        self._decode_scaling.learn(spread, seconds, np.where(is_plain, decode_s, 0.0))
        self._prefill_scaling.learn(spread, rest, np.where(is_plain, 0.0, prompt_s))
        features = features * self._shares(spread)
        for kind, rows in enumerate((is_plain, ~is_plain)):
            self._model.learn(features[rows], seconds[rows], kind)

    def _shares(self, spread: np.ndarray) -> np.ndarray:
        """Return for each step and feature how many times as long it takes as on the worker's own cores."""
        shares = self._decode_scaling.share(spread), self._prefill_scaling.share(spread)
        return np.repeat(np.column_stack(shares), 3, axis=1)


class _Scaling:
    """How much sooner steps end on more cores: they take spread ** -scaling as long."""

    def __init__(self, first: float) -> None:
        self.value = first

    def share(self, spread: np.ndarray) -> np.ndarray:
        share: np.ndarray = spread**-self.value
        return share

    def learn(self, spread: np.ndarray, seconds: np.ndarray, on_own_cores: np.ndarray) -> None:
        """Learn from the steps on lent cores. Their median counts: a pause of the machine says nothing."""
        useful = (spread > 1) & (seconds > 0) & (on_own_cores > 0)
        count = int(useful.sum())
        if count:
            found = np.log(on_own_cores[useful] / seconds[useful]) / np.log(spread[useful])
            fade = (1 - 1 / SCALING_MEMORY) ** count
            self.value = fade * self.value + (1 - fade) * float(np.clip(np.median(found), 0, 1))


def _columns(steps: Sequence[_Step]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps' features, seconds and shares of cores."""
    works = [step.work for step in steps]
    features = [(1.0, w.rows, w.context, float(w.tokens > 0), w.tokens, w.pairs) for w in works]
    return np.array(features), np.array([s.seconds for s in steps]), np.array([s.spread for s in steps])


SEED_WEIGHT = 0.1
"""The weight of each row that is kept for good."""


class Regression:
    """Least squares of relative errors. A row counts e times less after `memory` more of its kind: rows of a
    rare kind would else be forgotten before there are enough of them.
    """

    def __init__(self, num_features: int, memory: float, num_kinds: int = 1) -> None:
        self._fade = 1 - 1 / memory
        self._recent = np.zeros((num_kinds, num_features, num_features + 1))
        """Sums over rows of the products of features with each other and, in the last column, with values."""
        self._kept = np.zeros_like(self._recent[0])
        self.weights = np.zeros(num_features)

    def learn(self, features: np.ndarray, values: np.ndarray, kind: int = 0) -> None:
        """Learn from rows of one kind, oldest first."""
        rows = np.column_stack((features, values)) / np.maximum(values, 1e-9)[:, None]
        age = self._fade ** np.arange(len(rows) - 1, -1, -1)
        self._recent[kind] *= self._fade ** len(rows)
        self._recent[kind] += (rows[:, :-1] * age[:, None]).T @ rows
        self._solve()

    def keep(self) -> None:
        """Never forget what was learned so far."""
        self._kept, self._recent = SEED_WEIGHT * self._recent.sum(axis=0), np.zeros_like(self._recent)

    def _solve(self) -> None:
        """Leave out the feature with the most negative weight until there is none."""
        sums = self._recent.sum(axis=0) + self._kept
        squares, products = sums[:, :-1], sums[:, -1]
        sizes = np.sqrt(np.maximum(np.diag(squares), 1e-30))
        squares, products = squares / np.outer(sizes, sizes) + 1e-9 * np.eye(len(sizes)), products / sizes
        used, found = np.arange(len(sizes)), np.zeros(0)
        while len(used):
            found = np.linalg.solve(squares[np.ix_(used, used)], products[used])
            if (found >= 0).all():
                break
            used, found = np.delete(used, found.argmin()), np.zeros(0)
        self.weights = np.zeros(len(sizes))
        self.weights[used] = found / sizes[used]
