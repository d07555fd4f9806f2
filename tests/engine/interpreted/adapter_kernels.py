"""Adapters' contributions to rows of a product, in Triton's interpreter, compared with torch's products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from engine.devices.cuda.adapters import AdaptedProduct
from engine.lora.files import LinearShape, LowRankProduct
from engine.lora.table import Adapters, place, table_of

CPU = torch.device("cpu")
WIDE = {"q": LinearShape(150, 1100), "k": LinearShape(24, 1100), "v": LinearShape(24, 1100)}
"""Inputs need several splits, and outputs several blocks of columns."""
LINEARS = {"other": LinearShape(8, 8), **WIDE}


class Side:
    """Adapters with these ranks by layer, in the model's dtype; 0 is none."""

    def __init__(
        self,
        ranks: Sequence[Mapping[str, int]],
        dtype: torch.dtype = torch.float32,
        max_rank: int = 64,
        linears: Mapping[str, LinearShape] = LINEARS,
    ) -> None:
        torch.manual_seed(6)
        self.adapters = Adapters(linears, CPU, dtype, max_rank)
        self.products = [
            {path: random_product(linears[path], rank) for path, rank in each.items()} for each in ranks
        ]
        self._placed = [place(each, CPU, dtype) for each in self.products]
        self._tables = [table_of(each, linears, CPU) for each in self._placed]
        self._dtype = dtype

    def added(self, paths: Sequence[str], out: Tensor, x: Tensor, owners: Sequence[int]) -> Tensor:
        """Return a copy of `out`, which may have further columns, with the adapters added. Owner 0 means no
        adapter.
        """
        addresses = [self._tables[owner - 1].data_ptr() if owner else 0 for owner in owners]
        found = out.clone(memory_format=torch.preserve_format)
        AdaptedProduct.of(paths, self.adapters).add(found, x, torch.tensor(addresses))
        return found

    def expected(self, paths: Sequence[str], out: Tensor, x: Tensor, owners: Sequence[int]) -> Tensor:
        expected, first = out.double(), 0
        for path in paths:
            columns = slice(first, first + self.adapters.linears[path].outputs)
            for row, owner in enumerate(owners):
                product = self.products[owner - 1].get(path) if owner else None
                if product is not None:
                    down, up = (side.to(self._dtype).double() for side in product)
                    expected[row, columns] += up @ (down @ x[row].double())
            first = columns.stop
        return expected


def random_product(shape: LinearShape, rank: int) -> LowRankProduct:
    down = torch.randn(rank, shape.inputs) / shape.inputs**0.5
    return LowRankProduct(down, torch.randn(shape.outputs, rank) / rank**0.5)


RANKS = [{"q": 4, "k": 16, "v": 1}, {"q": 33, "v": 64}, {"other": 4}, dict.fromkeys(WIDE, 8)]
OWNERS = [1, 2, 1, 0, 3, 4, 2, 2, 1, 0, 0, 1, 1, 4, 4, 2, 2, 2, 1, 0, 3, 4]
"""Owners of two tiles of rows, the second one not full."""


def inputs_of(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    outputs = sum(shape.outputs for shape in WIDE.values())
    return torch.randn(num_rows, outputs).to(dtype), torch.randn(num_rows, 1100).to(dtype)


@pytest.mark.parametrize("paths", [["q", "k", "v"], ["v"]], ids=["joined", "alone"])
def test_rows_get_their_adapters_contributions(paths: list[str]) -> None:
    """Several adapters of different ranks, some of which leave some layers alone. Each writes to its own
    columns.
    """
    side, (out, x) = Side(RANKS), inputs_of(len(OWNERS))
    out = out[:, : sum(WIDE[path].outputs for path in paths)].contiguous()
    found, expected = (each(paths, out, x, OWNERS) for each in (side.added, side.expected))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    assert all(torch.equal(found[row], out[row]) for row, owner in enumerate(OWNERS) if owner in (0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_alone_and_among_many(dtype: torch.dtype) -> None:
    """Whatever the other rows' adapters and ranks are."""
    side, (out, x) = Side(RANKS, dtype), inputs_of(len(OWNERS), dtype)
    together = side.added([*WIDE], out, x, OWNERS)
    for row in (*range(6), *range(16, len(OWNERS))):  # of every owner, in both tiles
        alone = side.added([*WIDE], out[row : row + 1], x[row : row + 1], [OWNERS[row]])
        assert torch.equal(alone[0], together[row])
    others = side.added([*WIDE], out, x, [owner or 2 for owner in OWNERS])
    assert all(torch.equal(others[row], together[row]) for row, owner in enumerate(OWNERS) if owner)
    scale = 1e-6 if dtype is torch.float32 else 2e-2
    expected = side.expected([*WIDE], out, x, OWNERS)
    torch.testing.assert_close(together.double(), expected, atol=scale, rtol=scale)


def test_ranks_beyond_those_of_a_program() -> None:
    linears = {"layer": LinearShape(20, 40)}
    side = Side([{"layer": 100}, {"layer": 3}, {"layer": 65}], max_rank=100, linears=linears)
    out, x, owners = torch.randn(4, 20), torch.randn(4, 40), [1, 0, 2, 3]
    found, expected = (each(["layer"], out, x, owners) for each in (side.added, side.expected))
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def test_matrices_lie_where_wide_loads_begin() -> None:
    """Each matrix, and each row of `up`. The compiler relies on it, but the interpreter would not notice."""
    for dtype in (torch.float32, torch.bfloat16):
        side = Side(RANKS, dtype)
        for products, table in zip(side._placed, side._tables, strict=True):
            for path, (down, up, rank) in zip(LINEARS, table.tolist(), strict=True):
                assert down % 16 == up % 16 == rank % 8 == 0
                assert (rank > 0) == (path in products)
                if rank:
                    assert [*map(Tensor.data_ptr, products[path])] == [down, up]
                    assert products[path].down.is_contiguous() and products[path].up.is_contiguous()
                    assert rank == len(products[path].down) == products[path].up.shape[1]


def test_strided_rows_and_inputs_in_any_layout() -> None:
    """A module's rows are of a batch of one."""
    side, owners = Side([{"layer": 5}], linears={"layer": LinearShape(20, 40)}), [1, 0, 1]
    whole, x = torch.randn(1, 3, 33), torch.randn(40, 3).T.unsqueeze(0)
    found = whole.clone()
    product = AdaptedProduct.of(["layer"], side.adapters)
    table = side._tables[0].data_ptr()
    product.add(found[..., :20], x, torch.tensor([table if owner else 0 for owner in owners]))
    expected = side.expected(["layer"], whole[0, :, :20], x[0], owners)
    torch.testing.assert_close(found[0, :, :20].double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[..., 20:], whole[..., 20:])
