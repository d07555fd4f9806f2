"""Stands for a full disk: a limit on the size of files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

REASON = "File too large"


@contextlib.contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `most_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
