"""Makes the last line of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NO_REASON = {"", "None", "unconditional skip", "<Skipped instance>"}
"""Pytest's texts for a skip without a reason."""


@dataclass(frozen=True)
class LeftOut:
    """The modules of which a tier did not run all tests, and what these tests cost."""

    modules: int
    cpu_s: float
    reached_cpu_s: float
    since: str

    def __str__(self) -> str:
        left_out = f"{self.cpu_s:.0f} CPU-s left out in {self.modules} modules"
        reached = f", {self.reached_cpu_s:.0f} of them reached by changes since {self.since}"
        return left_out + reached if self.reached_cpu_s else left_out


def closing_line(
    tier: str, counts: Sequence[str], skips: Counter[str], left_out: LeftOut | None, seed: int, wall_s: float
) -> str:
    """Return pytest's own closing line with more in it: `731 passed, 3 skipped (3 no GPU), ... in 31.2s`."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in skips.most_common())
    parts = [f"{part} ({reasons})" if part.endswith(" skipped") and reasons else part for part in counts]
    parts += [str(left_out)] if left_out else []
    return f"{', '.join(parts)}, {tier} tier, seed {seed} in {wall_s:.1f}s"


def reasons_of(skips: Iterable[object]) -> Counter[str]:
    """Count the reasons of skips in pytest's reports."""
    return Counter(_reason(skip) for skip in skips)


def _reason(skip: object) -> str:
    said = skip[2] if isinstance(skip, tuple) else skip
    return str(said).removeprefix("Skipped").removeprefix(": ").strip()
