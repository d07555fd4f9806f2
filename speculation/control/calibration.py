"""Measures at start what the target's forwards and a method's drafts take, on made-up sequences.

Each time is the median of several. What would take too long, or has no room, is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from torch import Tensor

from engine.rehearsal import Rehearsal
from engine.sequence import Sequence
from engine.speculator import Draft, Outcome, Verdict
from speculation.control.plan import Shape
from speculation.control.step_time import UNMEASURED, DraftTimes, TargetTimes
from speculation.drafter import Computed, Drafter

Verify = Callable[[Many[Sequence], Tensor], list[Verdict]]

_FORWARD_SECONDS = 0.15
"""Forwards that would take longer are not measured."""
_ENOUGH_SECONDS = 0.03
"""What is measured is repeated for so long."""
_LEAST, _MOST = 3, 9
"""But so many times at least and at most."""
_SHORT, _LONG = 16, 512
"""Tokens of a sequence's context."""
_SEVERAL = 8
"""Sequences that are to tell what one of them costs."""
_MANY = 16
"""Sequences that are to tell what a drafted token costs."""
_ROUNDS = 4
"""Steps in which drafting is measured."""
_DEEP = 4
"""Tokens of the chains that are to tell what a level costs."""


class Calibration:
    """Seconds on this machine; `verify` is how the target's tokens are chosen."""

    def __init__(self, rehearsal: Rehearsal, verify: Verify, max_sequences: int) -> None:
        self._rehearsal = rehearsal
        self._verify = verify
        self._max_sequences = max_sequences

    def target(self, max_rows: int) -> TargetTimes:
        """Powers of two of rows, each row in a sequence of its own as far as there are so many."""
        first, again = self._grid(max_rows), self._grid(max_rows)  # lest a busy second bend the shape
        measured = sorted((rows, min(found, again.get(rows, found))) for rows, found in first.items())
        if len(measured) < 2:
            return UNMEASURED
        per_sequence = self._per_sequence()
        per_context, per_attended = self._per_context()
        seconds = []
        for rows, found in measured:
            num_sequences = min(rows, self._max_sequences)
            context = _SHORT * (per_context * num_sequences + per_attended * rows)
            seconds.append(max(found - per_sequence * num_sequences - context, found / 2))
        return TargetTimes([rows for rows, _ in measured], seconds, per_sequence, per_context, per_attended)

    def _grid(self, max_rows: int) -> dict[int, float]:
        """Seconds by rows."""
        measured: dict[int, float] = {}
        for power in range(max_rows.bit_length()):
            rows = 1 << power
            if rows > 4 and 2 * measured[rows // 2] - measured[rows // 4] > _FORWARD_SECONDS:
                break
            num_sequences = min(rows, self._max_sequences)
            found = self._forward_seconds(num_sequences, rows // num_sequences)
            if found is None:
                break
            measured[rows] = found
        return measured

    def _per_sequence(self) -> float:
        """The same rows, of one sequence and of several."""
        several = min(_SEVERAL, self._max_sequences)
        one, spread = self._forward_seconds(1, several), self._forward_seconds(several, 1)
        if several == 1 or one is None or spread is None:
            return 0.0
        return max(spread - one, 0.0) / (several - 1)

    def _per_context(self) -> tuple[float, float]:
        """For each token of a sequence's context, and for each token that a row attends to."""
        several, each = min(_SEVERAL, self._max_sequences), 5
        long = min(_LONG, self._rehearsal.max_model_len - each)
        times = [
            self._forward_seconds(several, rows, context) for rows in (1, each) for context in (_SHORT, long)
        ]
        if long <= _SHORT or any(found is None for found in times):
            return 0.0, 0.0
        short_one, long_one, short_each, long_each = (found or 0.0 for found in times)
        one, many = max(long_one - short_one, 0.0), max(long_each - short_each, 0.0)
        tokens = several * (long - _SHORT)
        per_attended = max(many - one, 0.0) / (tokens * (each - 1))
        return max(one / tokens - per_attended, 0.0), per_attended

    def _forward_seconds(self, num_sequences: int, rows: int, context: int = _SHORT) -> float | None:
        """A decode step of `rows` rows of each sequence; None if there is no room for it."""
        sequences = self._rehearsal.sequences(num_sequences, context, rows)
        if sequences is None:
            return None
        for sequence in sequences:
            sequence.num_computed = context - 1
            sequence.draft = Draft([1] * (rows - 1)) if rows > 1 else None
        return _median_seconds(lambda: self._verify(sequences, self._rehearsal.forward(sequences).logits))

    def drafter(self, drafter: Drafter, shape: Shape) -> DraftTimes | None:
        """None if it found nothing to draft in made-up text, or there is no room."""
        many = min(_MANY, self._max_sequences)
        deep = shape.max_tokens if shape.whole else min(_DEEP, shape.max_tokens)
        flat = deep if shape.whole else 1
        shallow, few = self._draft_seconds(drafter, 1, flat), self._draft_seconds(drafter, 1, deep)
        spread = self._draft_seconds(drafter, many, deep)
        if shallow is None or few is None or spread is None:
            return None
        per_token = max(spread - few, 0.0) / (max(many - 1, 1) * deep)
        per_level = 0.0 if deep == flat else max((few - shallow) / (deep - flat) - per_token, 0.0)
        start = max(shallow - per_level - per_token * flat, 0.0)
        return DraftTimes(start, per_level, per_token, self._per_read(drafter, flat))

    def _per_read(self, drafter: Drafter, num_tokens: int) -> float:
        """What each token of a prompt adds until its first draft is there."""
        room = 2 * (num_tokens + 1)
        length = min(_LONG, self._rehearsal.max_model_len - room)
        first: list[float] = []
        later: list[float] = []
        for _ in range(_LEAST):
            sequences = self._rehearsal.sequences(1, length, room)
            if sequences is None:
                return 0.0
            drafter.begin(sequences[0], 0, None)
            first.append(self._next_draft_seconds(drafter, sequences, num_tokens))
            later.append(self._next_draft_seconds(drafter, sequences, num_tokens))
            drafter.forget(sequences[0].request_id)
        capture = self._capture_seconds(length) if drafter.hidden_layers else 0.0
        return max(min(first) - min(later) + capture, 0.0) / length

    def _capture_seconds(self, length: int) -> float:
        """What it adds to a prompt's forward that its hidden states are kept."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        sequences = self._rehearsal.sequences(1, length, 1)
        if sequences is None:
            return 0.0
        for _ in range(_LEAST):
            for wants_hidden, measured in seconds.items():
                started = time.perf_counter()
                self._rehearsal.forward(sequences, wants_hidden=wants_hidden)
                measured.append(time.perf_counter() - started)
        return max(min(seconds[True]) - min(seconds[False]), 0.0)

    def _next_draft_seconds(self, drafter: Drafter, sequences: list[Sequence], num_tokens: int) -> float:
        """A step as the drafter sees it: it observes what was computed, and drafts."""
        observing = self._step(drafter, sequences)
        started = time.perf_counter()
        drafter.propose(sequences, [num_tokens] * len(sequences))
        return observing + time.perf_counter() - started

    def _draft_seconds(self, drafter: Drafter, num_sequences: int, num_tokens: int) -> float | None:
        room = (_ROUNDS + 1) * (num_tokens + 1)
        sequences = self._rehearsal.sequences(num_sequences, _SHORT, room)
        if sequences is None:
            return None
        for sequence in sequences:
            drafter.begin(sequence, 0, None)
        self._step(drafter, sequences)
        seconds = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            drafts = drafter.propose(sequences, [num_tokens] * num_sequences)
            seconds.append(time.perf_counter() - started)
            for sequence, draft in zip(sequences, drafts, strict=True):
                sequence.draft = draft
            found = any(draft is not None for draft in drafts)
            self._step(drafter, sequences)
        for sequence in sequences:
            drafter.forget(sequence.request_id)
        return statistics.median(seconds) if found else None

    def _step(self, drafter: Drafter, sequences: list[Sequence]) -> float:
        """As the engine's: the tokens that lack their KV and the drafts, then what came out of them. The
        seconds that the drafter took to observe it.
        """
        counts = [sequence.num_uncomputed for sequence in sequences]
        logits, hidden = self._rehearsal.forward(sequences)
        computed = []
        row = 0
        for sequence, count, verdict in zip(sequences, counts, self._verify(sequences, logits), strict=True):
            draft, sequence.draft = sequence.draft, None
            num_rows = count + (len(draft.token_ids) if draft is not None else 0)
            num_accepted = len(verdict.accepted)
            outcome = Outcome(
                sequence.num_computed, count + num_accepted, num_rows, num_accepted, draft, verdict
            )
            sequence.num_computed += outcome.num_tokens
            for token_id in verdict.token_ids:
                sequence.append(token_id)
            computed.append(Computed.of(sequence, outcome, hidden, row))
            row += num_rows
        started = time.perf_counter()
        drafter.observe(computed)
        return time.perf_counter() - started


def _median_seconds(action: Callable[[], object]) -> float:
    """Once unmeasured, since a first time may hold what is done only once."""
    action()
    seconds: list[float] = []
    while len(seconds) < _LEAST or (sum(seconds) < _ENOUGH_SECONDS and len(seconds) < _MOST):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
