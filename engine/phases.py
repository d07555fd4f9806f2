"""Log lines for the phases of a start, with the duration of slow phases."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("tandem.engine")
SLOW_S = 5.0
"""Seconds after which a phase is logged again at its end. A quick start logs each phase once."""


@contextmanager
def phase(work: str, expected: str) -> Iterator[None]:
    """Log the `work` and its `expected` duration and, if the work was slow, how long it took."""
    logger.info("%s, which takes %s ...", work, expected)
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    if took_s > SLOW_S:
        logger.info("%s took %.1f s", work, took_s)
