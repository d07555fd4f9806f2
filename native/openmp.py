"""Access to torch's own OpenMP threads, for kernels that are called between torch's operators."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

logger = logging.getLogger("tandem.engine")


@functools.cache
def gomp_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch itself uses, or 0.

    Torch's threads spin for a while after each operator, so threads of our own (threads.py) would wait for a
    core.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(torch_cpu)).GOMP_parallel
    except (OSError, AttributeError) as error:
        logger.warning("our kernels run on one thread: torch's OpenMP runtime was not found (%s)", error)
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
