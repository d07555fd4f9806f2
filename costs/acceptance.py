"""How likely drafted tokens are to be accepted, learned from those that were verified.

Token i of a draft can only be accepted after token i - 1. So all rates are conditional: of a token's
acceptance, given that all before it are accepted. A method has a rate for each position, and one for each
degree of the drafter's confidence in the token. The product of the rates along a draft is its survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import numpy as np

FIRST_RATE = 0.75
"""[share] Acceptance at each position before any draft. Optimistic: what is tried is soon known, what is not
tried never.
"""
FIRST_WEIGHT = 20.0
"""[drafts] The weight of a first rate: a method that fails is given up after about so many."""
MEMORY = 500.0
"""[drafts] Rates are averaged over so many: those of a few dozen requests."""


class MethodAcceptance:
    """Conditional acceptance rates by position. `found` is the share of wanted drafts that was found."""

    def __init__(self, num_positions: int, rates: list[float] | None = None) -> None:
        """Begin with these `rates`, as uncertain as before any draft."""
        self._tried = [FIRST_WEIGHT] * num_positions
        self._accepted = [FIRST_WEIGHT * rate for rate in rates or [FIRST_RATE] * num_positions]
        self.found = 1.0
        self._num_drafts = 0

    def rates(self) -> list[float]:
        """Return the rates. May be called from any thread."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [min(accepted / tried, 1.0) for accepted, tried in pairs]

    def observe(self, depth: int, num_accepted: int, dropped: float | None = None) -> None:
        """Note that the first `num_accepted` tokens of a draft of `depth` were accepted. The next token was
        not verified if it is `dropped`, whose rate by confidence this is.
        """
        kept = 1 - 1 / MEMORY
        for position in range(min(num_accepted + 1, depth, len(self._tried))):
            self._tried[position] = kept * self._tried[position] + 1
            self._accepted[position] = kept * self._accepted[position] + (position < num_accepted)
        if dropped is not None and num_accepted == depth < len(self._tried):
            self._tried[depth] = kept * self._tried[depth] + 1
            self._accepted[depth] = kept * self._accepted[depth] + dropped

    def observe_found(self, *, is_found: bool) -> None:
        """Note whether a request that wanted a draft got one."""
        self._num_drafts += 1
        self.found += max(1 / MEMORY, 1 / (FIRST_WEIGHT + self._num_drafts)) * (is_found - self.found)


NUM_LATEST, LEAST_LATEST = 128, 64
"""[drafts] The latest drafts tell what the next ones will bring, once there are so many."""
PACE = 0.02
"""[share] The weight of one token in the calibration of confidences."""
LEAST_SLOPE = 0.1
"""Surer tokens are accepted more often."""
SUREST = 9.0
"""[log-odds] A greater confidence counts as this."""


class Calibration:
    """The acceptance of tokens by the drafter's confidence in them: the log-odds of acceptance are `offset` +
    `slope` * confidence, learned by stochastic gradients (Platt 1999). Confidences are log-odds, too.

    Rates by position as well, or by bins of confidence, predict no better (bundled pair). A draft ends with a
    token whose survival is below `floor`.
    """

    def __init__(self) -> None:
        self.offset, self.slope, self.floor = 0.0, 1.0, 0.0

    def rate(self, confidence: float) -> float:
        return 1 / (1 + exp(-(self.offset + self.slope * max(-SUREST, min(confidence, SUREST)))))

    def survival(self, confidences: np.ndarray) -> np.ndarray:
        """Return the survival of drafted tokens. `confidences` [drafts, positions]; -inf for no token."""
        odds = np.exp(self.offset + self.slope * np.minimum(confidences, SUREST))
        return (odds / (1 + odds)).cumprod(1)

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Note that so many tokens of a draft were accepted."""
        for place, confidence in enumerate(confidences[: num_accepted + 1]):
            error = (place < num_accepted) - self.rate(confidence)
            self.offset += PACE * error
            self.slope = max(self.slope + PACE * error * max(-SUREST, min(confidence, SUREST)), LEAST_SLOPE)


class LatestDrafts:
    """The survival of the tokens of the latest drafts, to a depth of `num_positions`."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._survival = np.zeros((NUM_LATEST, num_positions))
        self._floors = np.zeros((NUM_LATEST, 1))
        self._num_seen = 0

    @property
    def are_known(self) -> bool:
        return self._num_seen >= LEAST_LATEST

    def add(self, survival: np.ndarray, floor: float) -> None:
        """Add [drafts, positions], which end with a token below this floor."""
        places = np.arange(self._num_seen, self._num_seen + len(survival)) % NUM_LATEST
        self._survival[places], self._floors[places] = survival, floor
        self._num_seen += len(survival)

    def survival(self, rates: Sequence[float]) -> np.ndarray:
        """Return [drafts, positions]. Behind a token below its floor it falls by these `rates`."""
        count = min(self._num_seen, NUM_LATEST)
        survival, along = self._survival[:count], np.cumprod(rates)
        last = np.maximum((survival > 0).sum(1) - 1, 0)[:, np.newaxis]
        end = np.take_along_axis(survival, last, 1)
        is_unknown = (end < self._floors[:count]) & (np.arange(len(along)) > last)
        return np.where(is_unknown, end * along / along[last], survival)
