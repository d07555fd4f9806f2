"""Which attention backend serves a device and dtype."""

from __future__ import annotations

import functools
import logging

import torch

from engine.attention.cpu_kernel.backend import CpuBackend, load
from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchBackend
from native.build import BuildError

logger = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": CpuBackend, "torch": TorchBackend}


@functools.cache
def _cpu_kernel_fault() -> str | None:
    """Why the CPU kernel cannot be had on this machine."""
    try:
        load()
    except BuildError as error:
        logger.warning("CPU attention falls back to torch's operators: %s", error)
        return str(error)
    return None


def _cpu_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the cpu kernel does not run on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the cpu kernel does not take {dtype}"
    return _cpu_kernel_fault()


def available_backends(device: torch.device, dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the backends that can serve this device and dtype, best first."""
    return ["torch"] if _cpu_fault(device, dtype) else ["cpu", "torch"]


def select_backend(
    device: torch.device, dtype: torch.dtype, requested: str | None = None
) -> tuple[type[AttentionBackend], str]:
    """The backend's class and the reason for the choice, to be logged.

    `requested` None or "auto" takes the best. Raises ValueError when it is unknown or cannot serve this
    device and dtype.
    """
    if requested == "auto":
        requested = None
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(BACKENDS)}")
    fault = _cpu_fault(device, dtype)
    if requested == "cpu" and fault:
        raise ValueError(f"attention backend 'cpu': {fault}")
    if requested is not None:
        return BACKENDS[requested], "requested"
    if fault:
        return TorchBackend, fault
    return CpuBackend, "reads the KV blocks in place"
