"""Log lines that tell what a start is at, and how long each part of it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("tandem.engine")


@contextmanager
def phase(work: str, expected: str) -> Iterator[None]:
    """Log the `work` and what it is `expected` to take, and afterwards what it took."""
    logger.info("%s, which takes %s ...", work, expected)
    started = time.monotonic()
    yield
    logger.info("%s took %.1f s", work, time.monotonic() - started)
