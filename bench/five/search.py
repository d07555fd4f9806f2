"""The search for the highest rate that meets an objective: raise or lower a first guess, then bisect."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLOSE = 1.025
"""The search ends once the bounds are within this ratio."""
STEPS = 8
"""Most steps up or down from the first guess."""


class NoRateError(Exception):
    """The lowest rate that was tried does not meet the objective, either."""


def highest(
    first: float, probes: int, trial: Callable[[float], tuple[bool, T]], step: float = 2.0
) -> tuple[float, T]:
    """Return the highest rate whose trial passed, and the result of that trial.

    The guess `first` is multiplied or divided by `step` until one trial has passed and one has failed.
    `probes` limits the trials after that. Raises NoRateError if no trial passed.
    """
    passed: tuple[float, T] | None = None
    failed: float | None = None
    rate = first
    for _ in range(STEPS):
        if passed is not None and failed is not None:
            break
        good, brought = trial(rate)
        if good:
            passed, rate = (rate, brought), step * rate
        else:
            failed, rate = rate, rate / step
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
