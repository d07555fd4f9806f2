"""Attention over coded rows is that over what they decode to, and no row's bits depend on the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.attention.select import available_backends
from engine.kv_rows import CODE_DTYPES, KvRows
from tests.engine.attention_packs import Pack, make_pack, run
from tests.engine.test_attention_backends import BACKENDS, MIXED, reference
from tests.engine.test_attention_invariance import CROWD, run_in_chunks
from tests.engine.test_attention_trees import chain_of, mixed_masks, tree_masks, with_masks
from tests.engine.test_attention_trees import reference as tree_reference

needs_kernel = pytest.mark.skipif(
    "cpu" not in available_backends(torch.device("cpu")), reason="the CPU kernel needs a C++ compiler"
)
TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 3e-2}
CODED = [(dtype, name) for dtype in TOLERANCE for name in CODE_DTYPES]
coded = pytest.mark.parametrize(("dtype", "quantization"), CODED, ids=str)


def decoded(pack: Pack) -> Pack:
    """With the keys and values that its rows decode to, not rounded to the pack's dtype."""
    exact = KvRows(torch.float32, pack.rows.quantization)
    keys, values = ([exact.decode(exact.encode(rows)) for rows in side] for side in (pack.keys, pack.values))
    return replace(pack, keys=keys, values=values)


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@coded
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_attention_over_what_the_rows_decode_to(
    backend: str, head_dim: int, dtype: torch.dtype, quantization: str
) -> None:
    pack = make_pack([*MIXED, (1, 700)], head_dim=head_dim, dtype=dtype, quantization=quantization)
    for window, softcap in ((None, None), (50, 5.0)):
        out = run(backend, pack, window=window, softcap=softcap)
        assert_near(out, reference(decoded(pack), 0.125, window, softcap))


@coded
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees(backend: str, dtype: torch.dtype, quantization: str) -> None:
    lengths = [(1, 40), (5, 33), (40, 530), (30, 63)]
    masks = mixed_masks(lengths)
    pack = make_pack(lengths, dtype=dtype, quantization=quantization)
    out = run(backend, with_masks(pack, masks))
    assert_near(out, tree_reference(decoded(pack), masks, 0.125, None, None))


@needs_kernel
@coded
def test_both_backends_store_the_same_bytes(dtype: torch.dtype, quantization: str) -> None:
    packs = [make_pack(MIXED, dtype=dtype, quantization=quantization) for _ in range(2)]
    for backend, pack in zip(("cpu", "torch"), packs, strict=True):
        pack.key[0] *= 1e-32  # too small for a scale
        pack.key[1] *= 1e30
        pack.value[3, 1, 5] = torch.inf
        run(backend, pack)
    assert torch.equal(packs[0].pool, packs[1].pool)
    scales = [pack.scales for pack in packs]
    torch.testing.assert_close(*scales, atol=0, rtol=0, equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CODE_DTYPES)
def test_every_code_is_read_as_its_value(name: str, dtype: torch.dtype) -> None:
    """A row that sees itself alone gives its value, which has all codes, at a scale of 1."""
    values = torch.arange(256, dtype=torch.uint8).view(CODE_DTYPES[name]).float()
    values = values.nan_to_num(0.0).clamp(min=-127 if name == "int8_row_scales" else -448).to(dtype)
    pack = make_pack([(1, 1)], kv_heads=1, head_dim=256, dtype=dtype, quantization=name)
    pack.value[0, 0] = values
    out = run("cpu", pack)
    torch.testing.assert_close(out[0], values.expand(4, -1), atol=0, rtol=1e-6)


@needs_kernel
def test_rows_that_the_kernel_cannot_read_are_refused() -> None:
    layers = make_pack([(1, 1)], quantization="int8_row_scales").layers
    for rows in (None, KvRows(torch.float32), KvRows(torch.float16, "int8_row_scales")):
        with pytest.raises(ValueError, match=r"layers of torch.uint8 are not rows of"):
            CpuBackend(layers, rows=rows)


@needs_kernel
@coded
def test_alone_in_a_crowd_and_on_two_threads(dtype: torch.dtype, quantization: str) -> None:
    before = torch.get_num_threads()
    together = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pack = make_pack(CROWD, heads=7, kv_heads=1, dtype=dtype, quantization=quantization)
        together.append(run("cpu", pack, window=700))
    torch.set_num_threads(before)
    assert torch.equal(*together)
    row = 0
    for s, lengths in enumerate(CROWD):
        pack = make_pack([lengths], heads=7, kv_heads=1, dtype=dtype, quantization=quantization, first_seed=s)
        assert torch.equal(together[0][row : row + lengths[0]], run("cpu", pack, window=700)), lengths
        row += lengths[0]


@needs_kernel
@coded
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (6, 128)])
def test_whole_and_in_chunks_give_the_same_bits_and_bytes(
    heads: int, head_dim: int, dtype: torch.dtype, quantization: str
) -> None:
    """Few rows read codes where they lie, two rows at a time; many read packed ones."""

    def pack() -> Pack:
        return make_pack([(300, 300)], heads=heads, head_dim=head_dim, dtype=dtype, quantization=quantization)

    whole = pack()
    expected = run("cpu", whole)
    for chunk in (1, 16, 100):
        chunked = pack()
        assert torch.equal(run_in_chunks(chunked, chunk, None, None), expected)
        assert torch.equal(chunked.pool, whole.pool)
        torch.testing.assert_close(chunked.scales, whole.scales, atol=0, rtol=0, equal_nan=True)


@needs_kernel
@coded
def test_a_trees_path_has_the_bits_of_a_chain(dtype: torch.dtype, quantization: str) -> None:
    base = 470
    masks = tree_masks(60, base)
    tree = with_masks(make_pack([(60, base + 60)], dtype=dtype, quantization=quantization), [masks])
    out = run("cpu", tree)
    for row in range(0, 60, 7):
        path = [base + place for place in range(60) if masks[row] >> place & 1]
        chain = chain_of(tree, [*range(base), *path], len(path))
        assert torch.equal(run("cpu", chain)[-1], out[row]), row


def test_a_row_is_within_half_a_step_of_its_values() -> None:
    rows = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)) * 5
    top = rows.abs().amax(-1, keepdim=True)
    for name, share in (
        ("int8_row_scales", 0.5 / 127),
        ("fp8_row_scales", 1 / 28),
    ):  # E4M3: steps of 32 below 448
        kept = KvRows(torch.float32, name)
        stored = kept.encode(rows)
        assert stored.scales is not None and stored.scales.shape == rows.shape[:-1]
        assert stored.values[0, 0].nbytes + stored.scales[0, 0].nbytes == kept.row_bytes(32) == 36
        assert ((kept.decode(stored) - rows).abs() <= top * share * 1.001).all()
        assert kept.decode(stored)[rows.abs() == top].abs().allclose(top.flatten())


@pytest.mark.parametrize("head_dim", [6, 30, 516])
def test_head_sizes_that_do_not_fit(head_dim: int) -> None:
    assert KvRows(torch.float32).fault(head_dim) is None
    assert f"{head_dim} values in a head" in (KvRows(torch.float32, "int8_row_scales").fault(head_dim) or "")
