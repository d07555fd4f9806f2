"""The limits of a GPU: from its maker's data sheet, or measured if no data sheet is known here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.clock import time_of

_COPIED_BYTES = 1 << 30
_PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class Roofs:
    """Memory bandwidth `bytes_per_s`, and bfloat16 operations per second `flops` of the matrix units,
    without sparsity.
    """

    name: str
    bytes_per_s: float
    flops: float
    source: str


_SHEETS = {
    "NVIDIA A100-SXM4-40GB": (1555e9, 312e12, "NVIDIA A100 data sheet"),
    "NVIDIA A100-PCIE-40GB": (1555e9, 312e12, "NVIDIA A100 data sheet"),
    "NVIDIA A100-SXM4-80GB": (2039e9, 312e12, "NVIDIA A100 data sheet"),
    "NVIDIA A100 80GB PCIe": (1935e9, 312e12, "NVIDIA A100 data sheet"),
    "NVIDIA L4": (300e9, 121e12, "NVIDIA L4 data sheet"),
    "NVIDIA L40S": (864e9, 362e12, "NVIDIA L40S data sheet"),
    "NVIDIA H100 PCIe": (2000e9, 756e12, "NVIDIA H100 data sheet"),
    "NVIDIA H100 80GB HBM3": (3350e9, 989e12, "NVIDIA H100 data sheet"),
    "NVIDIA H100 NVL": (3900e9, 835e12, "NVIDIA H100 data sheet"),
    "NVIDIA H200": (4800e9, 989e12, "NVIDIA H200 data sheet"),
    "NVIDIA B200": (8000e9, 2250e12, "NVIDIA DGX B200 data sheet"),
    "NVIDIA GeForce RTX 4090": (1008e9, 165.2e12, "NVIDIA Ada architecture paper"),
    "NVIDIA GeForce RTX 5090": (1792e9, 209.5e12, "NVIDIA Blackwell architecture paper"),
}
"""Limits by torch's device name. The data sheets give twice these operations, with sparsity."""


def missing() -> str:
    """Return why there is no GPU to measure here, or an empty string."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA (deploy/install.sh chooses by the host)"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no NVIDIA GPU on this host"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {major}.{minor}, and the kernels need 8.0 (Ampere) or later"
    return ""


def roofs_of(name: str, reached: Roofs) -> Roofs:
    """Return the roofs of the named device, or `reached` if no data sheet is known here."""
    return Roofs(name, *_SHEETS[name]) if name in _SHEETS else reached


def measured(
    name: str, device: torch.device, copied_bytes: int = _COPIED_BYTES, size: int = _PRODUCT_SIZE
) -> Roofs:
    """Measure the rates of a large copy and a large product, which are somewhat below the device's peak."""
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = time_of(lambda: target.copy_(source), device).device_s
    matrix = torch.randn(size, size, device=device).bfloat16()
    product_s = time_of(lambda: matrix @ matrix, device).device_s
    return Roofs(name, 2 * copied_bytes / copy_s, 2 * size**3 / product_s, "a copy and a product, measured")
