"""An adapter's tensors as the kernel (`adapt.cpp`) reads them: in one stream, on huge pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from engine.kv.host_memory import HugePages
from engine.lora.files import Product
from engine.lora.structs import PartArgs

RANKS, INPUTS, OUTPUTS = 4, 32, 64
"""That lie together, as in the kernel; what is missing to whole multiples is zero."""


class PackedProduct(NamedTuple):
    """`down` [rank / RANKS, in / INPUTS, RANKS, INPUTS] and `up` [out / OUTPUTS, rank, OUTPUTS], in bfloat16.

    `inputs` and `outputs` are the layer's.
    """

    down: Tensor
    up: Tensor
    inputs: int
    outputs: int

    def part(self, outputs: range, first: int = 0) -> PartArgs:
        """Some of the outputs, for the kernel, which begin at `first` in what they are added to."""
        rank, own = self.up.shape[1], (outputs.start, outputs.stop)
        return PartArgs(self.down.data_ptr(), self.up.data_ptr(), rank, self.inputs, *own, first)


def pack(products: Mapping[str, Product]) -> dict[str, PackedProduct]:
    """All of an adapter's, one behind the other."""
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
