"""The thread pool of our own kernels."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from native.build import BuildError, load_library

logger = logging.getLogger("tandem.engine")


@functools.cache
def parallel() -> int:
    """Return the address of `tandem_parallel`, or 0 if it cannot be built; kernels then use one thread."""
    try:
        function = load_library(Path(__file__).parent / "threads.cpp").tandem_parallel
    except BuildError as error:
        logger.warning("our kernels run on one thread: %s", error)
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
