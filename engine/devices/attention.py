"""Which attention backend serves a device and dtype."""

from __future__ import annotations

import functools
import importlib
import logging

import torch

from engine.devices.cpu.attention.backend import CpuBackend, load
from engine.devices.torch.attention import TorchBackend
from engine.kv.attention import AttentionBackend
from engine.triton_support import triton_fault
from native.build import BuildError

logger = logging.getLogger(__name__)

NAMES = ("cpu", "triton", "torch")
"""The best that serves is taken."""


def backend_of(name: str) -> type[AttentionBackend]:
    if name == "triton":  # is not there on every host
        return importlib.import_module("engine.devices.cuda.attention.backend").TritonBackend
    return CpuBackend if name == "cpu" else TorchBackend


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


def _triton_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the triton kernel does not take {dtype}"
    return triton_fault(device)


def _fault(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot serve."""
    faults = {"cpu": _cpu_fault, "triton": _triton_fault}
    return faults[name](device, dtype) if name in faults else None


def available_backends(device: torch.device, dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the backends that can serve this device and dtype, best first."""
    return [name for name in NAMES if _fault(name, device, dtype) is None]


def select_backend(
    device: torch.device, dtype: torch.dtype, requested: str | None = None
) -> tuple[type[AttentionBackend], str]:
    """The backend's class and the reason for the choice, to be logged.

    `requested` None or "auto" takes the best. Raises ValueError when it is unknown or cannot serve this
    device and dtype.
    """
    if requested is not None and requested != "auto":
        if requested not in NAMES:
            raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(NAMES)}")
        if fault := _fault(requested, device, dtype):
            raise ValueError(f"attention backend {requested!r}: {fault}")
        return backend_of(requested), "requested"
    best = available_backends(device, dtype)[0]
    if best != "torch":
        return backend_of(best), "reads the KV blocks in place"
    fault = _fault("cpu" if device.type == "cpu" else "triton", device, dtype)
    return TorchBackend, fault or ""
