"""Log lines that tell what a start is at, and how long its slow parts took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("tandem.engine")
SLOW_S = 5.0
"""A phase that took no longer is not logged again at its end, so that a quick start stays calm."""


@contextmanager
def phase(work: str, expected: str) -> Iterator[None]:
    """Log the `work` and what it is `expected` to take, and afterwards what it took if it was slow."""
    logger.info("%s, which takes %s ...", work, expected)
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    if took_s > SLOW_S:
        logger.info("%s took %.1f s", work, took_s)
