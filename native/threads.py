"""The threads that our kernels run on: torch's between its operators, and a pool of our own."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from native.build import BuildError, address_of, load_library

logger = logging.getLogger("tandem.engine")


@functools.cache
def gomp_parallel() -> int:
    """Return the address of GOMP_parallel in torch's own OpenMP runtime, or 0.

    Torch's threads spin for a while after each operator, so other threads would wait for a core.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(torch_cpu)).GOMP_parallel
    except (OSError, AttributeError) as error:
        logger.warning("our kernels run on one thread: torch's OpenMP runtime was not found (%s)", error)
        return 0
    return address_of(function)


@functools.cache
def parallel() -> int:
    """Return the address of `tandem_parallel`, or 0 if it cannot be built; kernels then use one thread."""
    try:
        function = load_library(Path(__file__).parent / "threads.cpp").tandem_parallel
    except BuildError as error:
        logger.warning("our kernels run on one thread: %s", error)
        return 0
    return address_of(function)
