"""Support for Triton: whether its kernels can run, a count of their compilations, and block sizes."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("tandem.engine")


class Compilations:
    """The number of Triton kernels that this process compiles or loads from Triton's cache from now on.

    A step waits for either, so a server should compile all its kernels before it serves.
    """

    def __init__(self) -> None:
        from triton import knobs

        self.count, self.seconds = 0, 0.0
        knobs.compilation.listener = self._note

    def _note(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        seconds = times.total / 1e6
        self.count += 1
        self.seconds += seconds
        how = "loaded from Triton's cache" if cache_hit else "compiled"
        log.warning("kernel %s was %s after the start, in %.2f s", src.name, how, seconds)

    def totals(self) -> dict[str, float]:
        return {
            "kernel_compilations_total": self.count,
            "kernel_compilation_seconds_total": self.seconds,
        }


def can_build() -> bool:
    """Return whether Triton can compile the launcher of its kernels, as it does when the first one runs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_paths(scheme="posix_prefix")["include"]
    return compiler is not None and Path(headers, "Python.h").exists()


def triton_fault(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot serve the device; None if they can."""
    if device.type != "cuda":
        return f"the triton kernel does not run on {device.type}"
    if not torch.cuda.is_available():
        return "the triton kernel found no cuda device"
    if importlib.util.find_spec("triton") is None:
        return "the triton kernel needs the package triton, which PyTorch's build for CUDA brings along"
    if not can_build():
        return "the triton kernel needs a C compiler and Python's headers, on Debian gcc and python3-dev"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the triton kernel needs a device of compute capability 8.0 or later, not {major}.{minor}"
    return None


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """Return the next power of two, at least 16: the least size that tensor cores multiply."""
    return max(16, 1 << (number - 1).bit_length())
