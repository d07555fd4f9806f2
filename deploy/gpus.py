"""Finds out whether this host can use GPUs, without importing torch."""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from protocol.config import ServeConfig

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman put into containers."""


def may_use_gpu(config: ServeConfig) -> bool:
    """Return whether workers on this host may run on a GPU, as far as can be known without torch."""
    return config.device != "cpu" and not cuda_fault()


def runs_on_cpus(config: ServeConfig) -> bool:
    """Return whether surely all workers run on CPUs. Other nodes of a Ray cluster may have GPUs that this one
    lacks, but they have the same PyTorch.
    """
    if config.device != "auto":
        return config.device == "cpu"
    return bool(cuda_fault()) if config.ray_address is None else not has_cuda_build()


def in_container() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(mark).exists() for mark in _CONTAINER_MARKS)


def has_cuda_build() -> bool:
    """Return whether PyTorch is built for CUDA, without importing it."""
    spec = find_spec("torch")
    return spec is not None and Path(spec.origin or "").with_name("lib").joinpath("libtorch_cuda.so").exists()


def cuda_fault() -> str:
    """Return why no GPU can be used here, or "" if no obstacle can be found without torch."""
    if version("torch").endswith("+cpu"):
        return f"PyTorch {version('torch')} is built without CUDA: deploy/install.sh installs the other one"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this host has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "the NVIDIA driver finds no GPU" + (
            f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        )
    return ""
