"""Makes the last line of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

NO_REASON = {"", "None", "unconditional skip", "<Skipped instance>"}
"""Pytest's texts for a skip without a reason."""


def closing_line(
    tier: str, counts: Sequence[str], skips: Counter[str], left_out: str, seed: int, wall_s: float
) -> str:
    """Return pytest's own closing line with more in it: `731 passed, 3 skipped (3 no GPU), ... in 31.2s`."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in skips.most_common())
    parts = [f"{part} ({reasons})" if part.endswith(" skipped") and reasons else part for part in counts]
    parts += [left_out] if left_out else []
    return f"{', '.join(parts)}, {tier} tier, seed {seed} in {wall_s:.1f}s"


def reasons_of(skips: Iterable[object]) -> Counter[str]:
    """Count the reasons of skips in pytest's reports."""
    said = (str(skip[2] if isinstance(skip, tuple) else skip) for skip in skips)
    return Counter(text.removeprefix("Skipped").removeprefix(": ").strip() for text in said)
