"""A linear model with weights that are never negative, fitted to rows that come one after the other."""

from __future__ import annotations

import numpy as np

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
