"""The figures of a run, computed from records of single requests. All times are in seconds.

TTFT is the time from sending a request to its first token; ITL the gap between one piece of the stream and
the next; TPOT the mean time per output token after the first; E2EL the time of the whole request.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from bench.serve.client import Record


class LatencySummary(msgspec.Struct, frozen=True):
    """Mean and percentiles of one latency, in seconds; all zero without any value."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "LatencySummary":
        if not len(values):
            return cls()
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(np.mean(values)), p50, p90, p99)


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run.

    Throughputs count completed requests only. `goodput` is completed requests per second that met every
    objective, or None if no objective was set.
    """

    completed: int
    failed: int
    errors: dict[str, int]
    duration: float
    input_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    ttft: LatencySummary
    itl: LatencySummary
    tpot: LatencySummary
    e2el: LatencySummary
    goodput: float | None = None


def tpot(record: Record) -> float:
    """Return the seconds per output token after the first; 0 for a single token."""
    if record.output_tokens < 2:
        return 0.0
    return (record.token_times[-1] - record.token_times[0]) / (record.output_tokens - 1)


def latencies(record: Record) -> dict[str, float]:
    """Return the latencies of one completed request by the names that `--goodput` uses."""
    return {
        "ttft": record.token_times[0] - record.start,
        "tpot": tpot(record),
        "e2el": record.end - record.start,
    }


def meets(taken: Mapping[str, float], objectives: Mapping[str, float]) -> bool:
    """Return whether the latencies of a request are within every objective."""
    return all(taken[name] <= limit for name, limit in objectives.items())


def parse_objectives(specs: Sequence[str]) -> dict[str, float]:
    """Parse `--goodput` values such as `ttft:0.2` (seconds), separated by spaces or commas."""
    objectives = {}
    for spec in (part for value in specs for part in value.replace(",", " ").split()):
        name, _, limit = spec.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"--goodput knows ttft, tpot and e2el, got {spec!r}")
        try:
            objectives[name] = float(limit)
        except ValueError:
            raise ValueError(f"--goodput needs NAME:SECONDS, got {spec!r}") from None
        if not objectives[name] > 0:
            raise ValueError(f"--goodput needs seconds above 0, got {spec!r}")
    return objectives


def summarize(records: Sequence[Record], objectives: Mapping[str, float] | None = None) -> Summary:
    """Compute the figures of a run from its records."""
    completed = [record for record in records if not record.error]
    errors = Counter(record.error for record in records if record.error)
    duration = 0.0
    if records:
        duration = max(record.end for record in records) - min(record.start for record in records)
    per_second = 1.0 / duration if duration > 0 else 0.0
    taken = [latencies(record) for record in completed]
    gaps = [np.diff(record.token_times) for record in completed]
    output_tokens = sum(record.output_tokens for record in completed)
    input_tokens = sum(record.prompt_tokens for record in completed)
    goodput = None
    if objectives:
        goodput = sum(meets(each, objectives) for each in taken) * per_second
    return Summary(
        completed=len(completed),
        failed=len(records) - len(completed),
        errors=dict(errors),
        duration=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(completed) * per_second,
        output_throughput=output_tokens * per_second,
        total_throughput=(input_tokens + output_tokens) * per_second,
        ttft=LatencySummary.of([t["ttft"] for t in taken]),
        itl=LatencySummary.of(np.concatenate(gaps).tolist() if gaps else []),
        tpot=LatencySummary.of([tpot(r) for r in completed if r.output_tokens > 1]),
        e2el=LatencySummary.of([t["e2el"] for t in taken]),
        goodput=goodput,
    )
