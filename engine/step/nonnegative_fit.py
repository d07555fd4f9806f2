"""A linear model with weights that are never negative, fitted to rows that come one after the other."""

from __future__ import annotations

import itertools

import numpy as np

SEED_WEIGHT = 0.1
"""Of each row that is kept for good."""


class NonNegativeFit:
    """Least squares of relative errors, of three weights that are never negative. What came `memory` rows ago
    counts e times less.
    """

    def __init__(self, memory: float) -> None:
        self._fade = 1 - 1 / memory
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)
        self._kept_squares, self._kept_products = np.zeros((3, 3)), np.zeros(3)
        self.weights = np.zeros(3)

    def learn(self, features: np.ndarray, values: np.ndarray, scale: np.ndarray) -> None:
        """Of steps, oldest first. Errors count relative to `scale`: a pause of the machine counts little."""
        scale = np.maximum(scale, 1e-9)
        age = self._fade ** np.arange(len(features) - 1, -1, -1)
        rows = features / scale[:, None]
        fade = self._fade ** len(features)
        self._squares = fade * self._squares + (rows * age[:, None]).T @ rows
        self._products = fade * self._products + (rows * age[:, None]).T @ (values / scale)
        self._solve()

    def keep(self) -> None:
        """Never forget what was learned so far."""
        self._kept_squares, self._kept_products = SEED_WEIGHT * self._squares, SEED_WEIGHT * self._products
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)

    def _solve(self) -> None:
        """Of all choices of weights that are zero the one that fits best, if none is negative."""
        squares, products = self._squares + self._kept_squares, self._products + self._kept_products
        sizes = np.sqrt(np.maximum(np.diag(squares), 1e-30))
        squares, products = squares / np.outer(sizes, sizes) + 1e-9 * np.eye(3), products / sizes
        best, gain = np.zeros(3), 0.0
        for count in (1, 2, 3):
            for chosen in itertools.combinations(range(3), count):
                part = list(chosen)
                found = np.linalg.solve(squares[np.ix_(part, part)], products[part])
                if (found >= 0).all() and float(found @ products[part]) > gain:
                    gain = float(found @ products[part])
                    best = np.zeros(3)
                    best[part] = found
        self.weights = best / sizes
