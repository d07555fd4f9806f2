"""Measurements of one case in one round."""

from __future__ import annotations

import hashlib
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from bench.speculate.plan import Case


@dataclass(slots=True)
class TimedAnswer:
    """The answer to one request. Times are seconds on one clock; `lengths` counts its drafts by number of
    accepted tokens.
    """

    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    lengths: Counter[int] = field(default_factory=Counter)


class CaseMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over a case's requests; `ttft` and `tpot` are medians over them, in seconds.

    `steps` is the number of forwards for a request's tokens after its first, summed over the requests.
    `step_s` is the mean time of a step with nothing but decoding at full concurrency, `draft_s` the time
    spent on drafts; both are None if they are unknown. `lengths[n]` drafts had n tokens accepted.
    `digest` is a hash of all tokens.
    """

    case: Case
    round: int
    seconds: float
    num_tokens: int
    ttft: float
    tpot: float
    steps: int
    step_tokens: int
    drafted: int
    lengths: list[int]
    digest: str
    draft_s: float | None = None
    step_s: float | None = None
    load_average: float

    @property
    def throughput(self) -> float:
        """Return the output tokens per second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def draft_rounds(self) -> int:
        """Return the number of drafts."""
        return sum(self.lengths)

    @property
    def accepted(self) -> int:
        """Return the number of accepted drafted tokens."""
        return sum(length * count for length, count in enumerate(self.lengths))

    def __str__(self) -> str:
        rate = f", {self.accepted / self.drafted:.0%} accepted" if self.drafted else ""
        return f"{self.case}: {self.throughput:.1f} tok/s, TPOT {self.tpot * 1e3:.2f} ms{rate}"


def summarize(
    case: Case,
    number: int,
    answers: Sequence[TimedAnswer],
    draft_s: float | None = None,
    step_s: float | None = None,
) -> CaseMeasurement:
    lengths = sum((answer.lengths for answer in answers), Counter())
    return CaseMeasurement(
        case=case,
        round=number,
        seconds=max(answer.last for answer in answers) - min(answer.start for answer in answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        ttft=statistics.median(answer.first - answer.start for answer in answers),
        tpot=statistics.median(
            (answer.last - answer.first) / max(1, len(answer.token_ids) - 1) for answer in answers
        ),
        steps=sum(answer.steps - 1 for answer in answers),
        step_tokens=sum(len(answer.token_ids) - 1 for answer in answers),
        drafted=sum(answer.drafted for answer in answers),
        lengths=[lengths[length] for length in range(max(lengths, default=-1) + 1)],
        digest=_digest(answers),
        draft_s=draft_s,
        step_s=step_s,
        load_average=os.getloadavg()[0],
    )


def _digest(answers: Sequence[TimedAnswer]) -> str:
    """Return a hash of all tokens of all answers."""
    tokens = msgspec.json.encode([answer.token_ids for answer in answers])
    return hashlib.blake2b(tokens, digest_size=8).hexdigest()
