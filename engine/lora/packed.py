"""An adapter's tensors in the memory that products read.

The CPU kernel (`adapt.cpp`; `adapt.h` explains its structs) reads them in one stream, on huge pages. Torch
and the GPU kernels (`devices/cuda/adapter_kernels.py`) read them on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ctypes import Structure, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kv.host_memory import HugePages
from engine.lora.files import Product


class PartArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("down", "up")),
        *((name, c_int64) for name in ("rank", "inputs", "begin", "end", "first")),
    )


class AdaptedArgs(Structure):
    _fields_ = (("parts", c_void_p), ("num_parts", c_int64), ("rows", c_void_p), ("count", c_int64))


RANKS, INPUTS, OUTPUTS = 4, 32, 64
"""Number of adjacent ranks, inputs and outputs in the CPU kernel's layout; zeros fill whole multiples."""
_DEVICE_RANKS = 8
"""GPU ranks are zero-padded to multiples of this number, so that rows of `up` are 16-byte aligned."""


class PackedProduct(NamedTuple):
    """bfloat16 `down` [rank / RANKS, in / INPUTS, RANKS, INPUTS] and `up` [out / OUTPUTS, rank, OUTPUTS].

    `inputs` and `outputs` are the layer's.
    """

    down: Tensor
    up: Tensor
    inputs: int
    outputs: int

    def part(self, outputs: range, first: int = 0) -> PartArgs:
        """Return the kernel's struct for a range of outputs; they are added to a row from `first` on."""
        rank, own = self.up.shape[1], (outputs.start, outputs.stop)
        return PartArgs(self.down.data_ptr(), self.up.data_ptr(), rank, self.inputs, *own, first)


def pack(products: Mapping[str, Product]) -> dict[str, PackedProduct]:
    """Pack all products of an adapter into one allocation, in their order."""
    plain = {path: _packed(product) for path, product in products.items()}
    pages = HugePages(sum(each.down.nbytes + each.up.nbytes for each in plain.values()))
    return {
        path: each._replace(down=pages.copy(each.down), up=pages.copy(each.up))
        for path, each in plain.items()
    }


def _packed(product: Product) -> PackedProduct:
    (rank, inputs), outputs = product.down.shape, len(product.up)
    missing = -rank % RANKS
    down = pad(product.down, (0, -inputs % INPUTS, 0, missing)).bfloat16()
    up = pad(product.up.T, (0, -outputs % OUTPUTS, 0, missing)).bfloat16()
    return PackedProduct(
        down.unflatten(1, (-1, INPUTS)).unflatten(0, (-1, RANKS)).transpose(1, 2),
        up.unflatten(1, (-1, OUTPUTS)).transpose(0, 1),
        inputs,
        outputs,
    )


def place(products: Mapping[str, Product], device: torch.device, dtype: torch.dtype) -> dict[str, Product]:
    """Pad all products of an adapter and move them to the device."""
    return {
        path: Product(*(side.to(device, dtype) for side in _padded(each))) for path, each in products.items()
    }


def _padded(product: Product) -> Product:
    missing = -len(product.down) % _DEVICE_RANKS
    return Product(pad(product.down, (0, 0, 0, missing)), pad(product.up, (0, missing)))


def table_of(products: Mapping[str, Product], linears: Iterable[str], device: torch.device) -> Tensor:
    """Return `down`'s and `up`'s addresses and the rank, int64 [linear layers, 3]; zeros for no product."""
    return torch.tensor([_fields(products.get(path)) for path in linears], device=device)


def _fields(product: Product | None) -> tuple[int, int, int]:
    if product is None:
        return 0, 0, 0
    return product.down.data_ptr(), product.up.data_ptr(), len(product.down)
