"""A row's bits depend neither on the rest of the pack, nor on the threads, nor on the chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.attention.select import available_backends
from tests.engine.attention_packs import Pack, describe, make_pack, run

pytestmark = pytest.mark.skipif(
    "cpu" not in available_backends(torch.device("cpu")), reason="the CPU kernel needs a C++ compiler"
)
CROWD = [(1, 1300), (1, 40), (9, 700), (80, 600), (64, 64), (1, 513), (5, 512), (1, 2)]
SETTINGS = [(None, None), (100, None), (700, 4.0)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alone_and_in_a_crowd(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    torch.set_num_threads(1)
    together = run("cpu", make_pack(CROWD, dtype=dtype), window=window, softcap=softcap)
    row = 0
    for s, lengths in enumerate(CROWD):
        alone = run("cpu", make_pack([lengths], dtype=dtype, first_seed=s), window=window, softcap=softcap)
        assert torch.equal(together[row : row + lengths[0]], alone), lengths
        row += lengths[0]


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)], ids=str)
def test_any_number_of_threads(
    heads: tuple[int, int], dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        pack = make_pack(CROWD, heads=heads[0], kv_heads=heads[1], dtype=dtype)
        results.append(run("cpu", pack, window=window, softcap=softcap))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_prefill_whole_in_chunks_or_row_by_row(
    chunk: int, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    torch.set_num_threads(1)
    length = 600
    whole = make_pack([(length, length)], dtype=dtype)
    expected = run("cpu", whole, window=window, softcap=softcap)
    chunked = make_pack([(length, length)], dtype=dtype)
    assert torch.equal(run_in_chunks(chunked, chunk, window, softcap), expected)


def run_in_chunks(
    pack: Pack, chunk: int, window: int | None, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    backend = CpuBackend(pack.layers, rows=pack.rows)
    length, table, slots = pack.lengths[0][1], pack.metadata.block_table, pack.metadata.slot_mapping
    parts = []
    for begin in range(0, length, chunk):
        rows = slice(begin, min(begin + chunk, length))
        backend.begin_step(describe([(rows.stop - begin, rows.stop)], table, slots[rows]))
        new = (pack.query[rows], pack.key[rows], pack.value[rows])
        options = {"scale": 0.125, "sliding_window": window, "softcap": softcap, "sinks": sinks}
        parts.append(backend.forward(1, *new, **options))  # type: ignore[arg-type]
    return torch.cat(parts)


@pytest.mark.parametrize("quantization", ["none", "int8_row_scales"])
def test_sinks(quantization: str) -> None:
    """Alone, in a crowd, with splits shared by threads, in chunks."""
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0])
    together = []
    for count in (1, 5):
        torch.set_num_threads(count)
        together.append(run("cpu", make_pack(CROWD, quantization=quantization), sinks=sinks))
    assert torch.equal(*together)
    assert not torch.equal(together[0], run("cpu", make_pack(CROWD, quantization=quantization)))
    row = 0
    for s, lengths in enumerate(CROWD):
        alone = run("cpu", make_pack([lengths], first_seed=s, quantization=quantization), sinks=sinks)
        assert torch.equal(together[0][row : row + lengths[0]], alone), lengths
        row += lengths[0]
    whole = make_pack([(600, 600)], quantization=quantization)
    expected = run("cpu", whole, sinks=sinks)
    chunked = make_pack([(600, 600)], quantization=quantization)
    assert torch.equal(run_in_chunks(chunked, 100, None, None, sinks), expected)
