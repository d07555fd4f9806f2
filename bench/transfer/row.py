"""A row of the results: its value, its target, and its baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """`value` is in `unit`, by default a ratio. It is the median of `samples`."""

    what: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    ours: str = ""
    baseline: str = ""
    samples: list[float] = []

    @property
    def verdict(self) -> str:
        """Return the target, and whether it is reached; empty without a target."""
        if self.at_least is not None:
            sign, target, is_reached = ">=", self.at_least, self.value >= self.at_least
        elif self.at_most is not None:
            sign, target, is_reached = "<=", self.at_most, self.value <= self.at_most
        else:
            return ""
        return f"target {sign} {target:g}{self.unit}: {'reached' if is_reached else 'missed'}"

    def __str__(self) -> str:
        text = f"{self.what}: {self.value:.3g}{self.unit}"
        text += f" ({self.verdict})" if self.verdict else ""
        sides = [part for part in (self.ours, self.baseline) if part]
        return text + (f"; {' against '.join(sides)}" if sides else "")


def ratio_row(
    what: str,
    rounds: Sequence[tuple[float, float]],
    nbytes: int,
    at_least: float | None,
    baseline: str,
) -> TransferRow:
    """Return our speed as a share of the baseline's; `rounds` are (its seconds, our seconds) for `nbytes`
    bytes.

    The result is the median of the ratios within rounds, which cancels changes between rounds.
    """
    ratios = [theirs / ours for theirs, ours in rounds]
    their_rate, our_rate = (
        nbytes / 1e9 / statistics.median(seconds) for seconds in zip(*rounds, strict=True)
    )
    return TransferRow(
        what=what,
        value=statistics.median(ratios),
        at_least=at_least,
        ours=f"{our_rate:.2f} GB/s",
        baseline=f"{baseline} {their_rate:.2f} GB/s".strip(),
        samples=ratios,
    )
