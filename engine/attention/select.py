"""Which attention backend serves a device and dtype."""

from __future__ import annotations

import torch

from engine.attention.interface import AttentionBackend
from engine.attention.torch_backend import TorchBackend

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchBackend}


def available_backends(device: torch.device) -> list[str]:
    return list(BACKENDS)


def select_backend(
    device: torch.device, dtype: torch.dtype, requested: str | None = None
) -> tuple[type[AttentionBackend], str]:
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(BACKENDS)}")
    return TorchBackend, "torch's own operators"
