"""The attention backends by name, and which one serves a device and dtype."""

from __future__ import annotations

import importlib

import torch

from engine.kv.attention import AttentionBackend

BACKENDS = {
    "cpu": "engine.devices.cpu.attention.backend:CpuBackend",
    "triton": "engine.devices.cuda.attention.backend:TritonBackend",
    "sdpa": "engine.devices.torch.sdpa:SdpaBackend",
    "torch": "engine.devices.torch.attention:TorchBackend",
}
"""The class of each, imported when it is asked for: Triton is not there on every host."""


def backend_of(name: str) -> type[AttentionBackend]:
    """Raises ImportError where its library is not there."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return backend


def kernel_of(device: torch.device) -> str:
    """Name the backend that reads this device's KV blocks in place."""
    return "cpu" if device.type == "cpu" else "triton"


def backend_fault(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Tell why a backend can't serve this device and dtype; None if it can."""
    try:
        return backend_of(name).fault(device, dtype)
    except ImportError as error:
        return f"it needs the package {error.name}"


def select_backend(
    device: torch.device, dtype: torch.dtype, requested: str | None = None
) -> tuple[type[AttentionBackend], str]:
    """Return the backend's class and the reason for the choice, to be logged.

    `requested` None or "auto" takes the device's kernel, or torch's operators without one. Raises ValueError
    when it is unknown or cannot serve this device and dtype.
    """
    if requested is not None and requested != "auto":
        if requested not in BACKENDS:
            raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(BACKENDS)}")
        if fault := backend_fault(requested, device, dtype):
            raise ValueError(f"attention backend {requested!r}: {fault}")
        return backend_of(requested), "requested"
    name = kernel_of(device)
    if fault := backend_fault(name, device, dtype):
        return backend_of("torch"), fault
    return backend_of(name), "reads the KV blocks in place"
