"""Waits for conditions that no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.0005, 0.05, 1.2


def wait_until(
    done: Callable[[], object],
    timeout_s: float = WAIT_S,
    what: str | Callable[[], str] = "it",
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Return once `done()` is true, asked less and less often; `meanwhile` runs in between. Fails with
    `what`.
    """
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        meanwhile()
        time.sleep(pause_s)
        pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S)
