"""Whether Triton's kernels can serve a device, and how the sizes of their blocks are reckoned."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch


def can_build() -> bool:
    """Whether Triton can compile what launches its kernels, as it does when the first one runs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_paths(scheme="posix_prefix")["include"]
    return compiler is not None and Path(headers, "Python.h").exists()


def triton_fault(device: torch.device) -> str | None:
    """Why they cannot."""
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
    """The next one, from 16 on: what tensor cores multiply."""
    return max(16, 1 << (number - 1).bit_length())
