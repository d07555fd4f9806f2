"""Searches for the highest rate that meets an objective: doubles or halves a first guess, then bisects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLOSE = 1.1
"""The search ends once the bounds are within this ratio."""
DOUBLINGS = 8
"""The most doublings or halvings of the first guess."""


class NoRateError(Exception):
    """Even the lowest rate that was tried does not meet the objective."""


def highest(first: float, probes: int, trial: Callable[[float], tuple[bool, T]]) -> tuple[float, T]:
    """Return the highest rate whose trial passed, and the result of that trial.

    `probes` bounds the trials after the first pass and the first failure; finding these two takes as many
    trials as needed. Raises NoRateError if no trial passed.
    """
    passed: tuple[float, T] | None = None
    failed: float | None = None
    rate = first
    for _ in range(DOUBLINGS):
        if passed is not None and failed is not None:
            break
        good, brought = trial(rate)
        if good:
            passed, rate = (rate, brought), 2 * rate
        else:
            failed, rate = rate, rate / 2
    if passed is None:
        raise NoRateError(f"not even {failed:g} requests/s meet the SLO")
    for _ in range(probes if failed is not None else 0):
        assert failed is not None
        if failed / passed[0] <= CLOSE:
            break
        rate = math.sqrt(failed * passed[0])
        good, brought = trial(rate)
        if good:
            passed = rate, brought
        else:
            failed = rate
    return passed
