"""An adapter's tensors where torch and the kernels of a GPU (`devices/cuda/adapter_kernels.py`) read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.lora.files import Product

_RANKS = 8
"""Ranks are whole multiples of it, those that are missing zero: rows of `up` begin at 16 bytes then."""


def place(products: Mapping[str, Product], device: torch.device, dtype: torch.dtype) -> dict[str, Product]:
    """All of an adapter's, on the device."""
    return {
        path: Product(*(side.to(device, dtype) for side in _padded(each))) for path, each in products.items()
    }


def _padded(product: Product) -> Product:
    missing = -len(product.down) % _RANKS
    return Product(pad(product.down, (0, 0, 0, missing)), pad(product.up, (0, missing)))


def table_of(products: Mapping[str, Product], linears: Iterable[str], device: torch.device) -> Tensor:
    """int64 [linear layers, 3]: the addresses of `down` and `up`, and the rank; zeros where there is none."""
    return torch.tensor([_fields(products.get(path)) for path in linears], device=device)


def _fields(product: Product | None) -> tuple[int, int, int]:
    if product is None:
        return 0, 0, 0
    return product.down.data_ptr(), product.up.data_ptr(), len(product.down)
