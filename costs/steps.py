"""The times of a worker's steps as a function of their work, learned from every step that runs, and the bound
on the prompt tokens of steps that also decode.

The latest steps count most. Steps measured at the start count little but are never forgotten: they represent
the kinds of steps that have not run lately.

Steps on cores lent by idle workers count, too: a step on `spread` times the worker's own cores takes spread
** -scaling times as long, and the scaling is learned with the other weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from protocol.costs import StepCosts, itl_bound

MEMORY = 500.0
"""[steps] The number of latest steps that count, for decode-only steps and for those with prompts."""
DECODE_SCALING, PREFILL_SCALING = 0.5, 0.9
"""The scalings until steps ran on lent cores. Decoding waits for memory, which more cores share."""
SCALING_MEMORY = 100.0
"""[steps on lent cores] The number of latest steps that count for a scaling."""
_MOST_PENDING = 8192
"""The most steps that are kept until `costs` is called."""
_DECODE, _PROMPT = slice(0, 3), slice(3, 6)
"""The features of decode rows, and the features of prompt chunks."""


class ComputedSequence(Protocol):
    """A sequence with `num_computed` tokens computed."""

    num_computed: int


class StepWork(NamedTuple):
    """The work of a step: `rows` decoding sequences that attend to `context` tokens in all, and `tokens`
    prompt tokens, which attend to earlier tokens in `pairs` pairs.
    """

    rows: int = 0
    context: float = 0.0
    tokens: int = 0
    pairs: float = 0.0


def work_of(sequences: Sequence[ComputedSequence], counts: Sequence[int]) -> StepWork:
    """Return the work of a step that is about to run. A prompt's last token on its own counts as a decode
    row.
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
    """A worker's costs. Only the engine's thread calls `observe`; any thread may call `costs`."""

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
        """The latest result of `costs`, free to read."""
        self._model = Regression(6, MEMORY, num_kinds=2)
        self._decode_scaling, self._prefill_scaling = _Scaling(DECODE_SCALING), _Scaling(PREFILL_SCALING)
        self._pending: deque[_Step] = deque(maxlen=_MOST_PENDING)
        self.borrows = False
        """Whether idle workers lend cores to this worker."""
        self._accepted = self._rows = 0.0
        self._error = self._judged = 0.0
        self._lock = threading.Lock()

    def seed(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """Learn from steps measured at the start, on the worker's own cores, and never forget them. A model
        of two tokens has room for none.
        """
        with self._lock:
            if measured:
                self._learn([_Step(work, seconds) for work, seconds in measured])
                self._model.keep()
        self.costs()

    def observe(self, work: StepWork, seconds: float, accepted: int = 0, spread: float = 1.0) -> None:
        """Record a step that ran on `spread` times the worker's own cores and accepted `accepted` draft
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
        """Compare new steps with the predictions made before them."""
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
        """Return each step's factor for each feature: its time relative to the worker's own cores."""
        shares = self._decode_scaling.share(spread), self._prefill_scaling.share(spread)
        return np.repeat(np.column_stack(shares), 3, axis=1)


class _Scaling:
    """The exponent by which more cores shorten a step: it takes spread ** -scaling times as long."""

    def __init__(self, first: float) -> None:
        self.value = first

    def share(self, spread: np.ndarray) -> np.ndarray:
        share: np.ndarray = spread**-self.value
        return share

    def learn(self, spread: np.ndarray, seconds: np.ndarray, on_own_cores: np.ndarray) -> None:
        """Learn from the steps on lent cores. Only their median counts: pauses of the machine do not."""
        useful = (spread > 1) & (seconds > 0) & (on_own_cores > 0)
        count = int(useful.sum())
        if count:
            found = np.log(on_own_cores[useful] / seconds[useful]) / np.log(spread[useful])
            fade = (1 - 1 / SCALING_MEMORY) ** count
            self.value = fade * self.value + (1 - fade) * float(np.clip(np.median(found), 0, 1))


def _columns(steps: Sequence[_Step]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps' features, seconds and spreads."""
    works = [step.work for step in steps]
    features = [(1.0, w.rows, w.context, float(w.tokens > 0), w.tokens, w.pairs) for w in works]
    return np.array(features), np.array([s.seconds for s in steps]), np.array([s.spread for s in steps])


SEED_WEIGHT = 0.1
"""The weight of each row that is never forgotten."""


class Regression:
    """Least squares of relative errors. `memory` later rows of the same kind cut a row's weight to 1/e. Kinds
    fade separately; otherwise rows of a rare kind would be forgotten before there are enough of them.
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
        """Keep everything learned so far for good."""
        self._kept, self._recent = SEED_WEIGHT * self._recent.sum(axis=0), np.zeros_like(self._recent)

    def _solve(self) -> None:
        """Solve for weights, dropping the feature with the most negative weight until none is negative."""
        sums = self._recent.sum(axis=0) + self._kept
        squares, products = sums[:, :-1], sums[:, -1]
        sizes = np.sqrt(np.maximum(np.diag(squares), 1e-30))
        squares, products = squares / np.outer(sizes, sizes) + 1e-9 * np.eye(len(sizes)), products / sizes
        used, found = np.arange(len(sizes)), np.linalg.solve(squares, products)
        while found.min(initial=0.0) < 0:
            used = np.delete(used, found.argmin())
            found = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        self.weights = np.zeros(len(sizes))
        self.weights[used] = found / sizes[used]


class ChunkBound:
    """The bound of each step in turn. It does not apply without an ITL budget (0) or without decoding
    sequences. `least_tokens` of a prompt always fit.
    """

    def __init__(self, costs: Callable[[], StepCosts], itl_budget_s: float, least_tokens: int) -> None:
        self._costs, self._budget_s, self._least = costs, itl_budget_s, least_tokens
        self._left_s: float | None = None

    def begin(self, rows: int, context: int, slo_tpot_s: float = inf) -> None:
        """Begin a step that decodes `rows` sequences, which attend to `context` tokens in all. `slo_tpot_s`
        is the strictest time per output token that their clients ask for.
        """
        if not rows or not self._budget_s:
            self._left_s = None
            return
        budget_s = itl_bound(self._budget_s, slo_tpot_s)
        self._left_s = self._costs().chunk_seconds(rows, context, budget_s)

    def tokens(self, wanted: int, before: int) -> int:
        """Return how many of a prompt's `wanted` tokens, which follow `before` computed ones, still fit."""
        if self._left_s is None:
            return wanted
        if self._left_s <= 0:
            return 0
        costs = self._costs()
        count = min(wanted, max(costs.fitting_tokens(self._left_s, before), self._least))
        self._left_s = self._left_s - costs.chunks_s(count, before, count) if count == wanted else 0.0
        return count

    @property
    def is_full(self) -> bool:
        return self._left_s is not None and self._left_s <= 0
