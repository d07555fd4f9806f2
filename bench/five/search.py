"""The highest rate that meets an objective: a first guess is doubled or halved, then bisected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLOSE = 1.1
"""Rates so near to each other end the search."""
DOUBLINGS = 8
"""From the first guess, up or down."""


class NoRateError(Exception):
    """Not even the lowest rate that was tried meets the objective."""


def highest(first: float, probes: int, trial: Callable[[float], tuple[bool, T]]) -> tuple[float, T]:
    """The highest rate whose trial was passed, and what that trial brought.

    `probes` bounds the trials after the first that was passed and the first that was not: it takes as many as
    needed to find these. Raises NoRateError when none was passed.
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
