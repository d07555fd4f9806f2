"""Effects of a two-level factorial experiment on the logarithm of a figure, as ratios with intervals.

A cell is the set of factors that are on; the design has all 2^k cells, and each repeat measures each cell
once. With signs s = +1 if a factor is on and -1 if it is off, N cells, and y the logarithms:

- the main effect of A is exp(sum(s_A y) / (N / 2)): the figure with A divided by the figure without A, as a
  geometric mean over all states of the other factors;
- the interaction of A and B is exp(sum(s_A s_B y) / (N / 4)): A's effect with B divided by A's effect without
  B. 1 says that the effects multiply.

Repeats are blocks: changes between them, such as the machine's speed, cancel. The error's variance is what
remains within cells; with one repeat it is what main effects and interactions of two factors do not explain
(Box, Hunter and Hunter, Statistics for Experimenters, chapters 5 and 6). Intervals are Student's, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench.five.factors import TechniqueSet, cells_of, name_of

CONFIDENCE = 0.95


class Effect(msgspec.Struct, frozen=True):
    """A ratio with its 95 % confidence interval, or None if the error cannot be estimated. `factors` holds
    one factor, or two that interact.
    """

    factors: tuple[str, ...]
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def is_certain(self) -> bool:
        """Return whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def effects(factors: Sequence[str], values: Mapping[TechniqueSet, Sequence[float]]) -> list[Effect]:
    """Return the main effects, then the interactions of two factors.

    `values` has a figure above 0 for each repeat of each cell. Raises ValueError that names a cell without
    figures, with a different number of figures, or with a figure not above 0.
    """
    cells = cells_of(factors)
    logs = _logs(cells, values)
    signs = {name: np.array([1.0 if name in cell else -1.0 for cell in cells]) for name in factors}
    contrasts: dict[tuple[str, ...], NDArray[np.float64]] = {}
    for name in factors:
        contrasts[name,] = signs[name] * 2 / len(cells)
    for one, other in combinations(factors, 2):
        contrasts[one, other] = signs[one] * signs[other] * 4 / len(cells)
    means = logs.mean(axis=1)
    variance, freedom = _error(logs, means, list(contrasts.values()))
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) if freedom else 0.0
    found = []
    for involved, contrast in contrasts.items():
        estimate = float(contrast @ means)
        if not freedom:
            found.append(Effect(involved, math.exp(estimate)))
            continue
        half = quantile * math.sqrt(variance / logs.shape[1] * float(contrast @ contrast))
        found.append(Effect(involved, *(math.exp(estimate + shift) for shift in (0, -half, half))))
    return found


def all_against_none(factors: Sequence[str], values: Mapping[TechniqueSet, Sequence[float]]) -> float:
    """Return the figure with all factors on divided by the figure with all factors off."""
    on, off = _logs([frozenset(factors), frozenset()], values).mean(axis=1)
    return math.exp(on - off)


def _logs(
    cells: Sequence[TechniqueSet], values: Mapping[TechniqueSet, Sequence[float]]
) -> NDArray[np.float64]:
    """Return the logarithms of the values, [cells, repeats]."""
    repeats = len(values.get(cells[0], ()))
    for cell in cells:
        figures = values.get(cell, ())
        if not figures or len(figures) != repeats:
            raise ValueError(
                f"cell {name_of(cell)} has {len(figures)} repeats, {name_of(cells[0])} {repeats}"
            )
        if not all(0 < figure < math.inf for figure in figures):
            raise ValueError(f"cell {name_of(cell)}: figures must be above 0 and finite, got {list(figures)}")
    return np.log(np.array([list(values[cell]) for cell in cells], dtype=np.float64))


def _error(
    logs: NDArray[np.float64], means: NDArray[np.float64], contrasts: Sequence[NDArray[np.float64]]
) -> tuple[float, int]:
    """Return the variance of a figure's logarithm and its degrees of freedom: 0 if it cannot be estimated."""
    count, repeats = logs.shape
    if repeats > 1:
        left = logs - means[:, None] - logs.mean(axis=0)[None, :] + logs.mean()
        freedom = (count - 1) * (repeats - 1)
    else:
        directions = [np.ones(count) / math.sqrt(count)]
        directions += [contrast / math.sqrt(contrast @ contrast) for contrast in contrasts]
        left = means - sum(direction * (direction @ means) for direction in directions)
        freedom = count - len(directions)
    return (float((left**2).sum()) / freedom, freedom) if freedom > 0 else (0.0, 0)
