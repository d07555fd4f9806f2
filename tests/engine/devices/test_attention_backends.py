"""Every attention backend compared with a plain float64 reference, over random packs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.devices.attention import select_backend
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.torch import attention
from engine.kv.attention import AttentionOptions, LayerKv
from engine.kv.row_codes import CODE_DTYPES, KvRows
from tests.engine.attention_packs import (
    BACKENDS,
    CHAINS_AND_TREES,
    Masks,
    make_pack,
    part_of,
    reference,
    run,
    tree_masks,
    with_first_keys,
    with_masks,
)
from tests.engine.interpreted.cases import Case, Options, Sequence, Shape, Step

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CODED_TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 3e-2}
CODED = [(dtype, name) for dtype in TOLERANCE for name in CODE_DTYPES]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_ROWS", 3)


def check(
    backend: str,
    pack: Step,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Compare a backend with the reference."""
    tolerance = (CODED_TOLERANCE if pack.rows.coded else TOLERANCE)[pack.rows.dtype]
    scale = 0.125 if pack.rows.coded else pack.case.shape.key_dim**-0.5 * 2
    expected = reference(pack, scale, window, softcap, sinks)  # first: a backend writes to the pool
    out = run(backend, pack, scale=scale, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 300)]
MIXED = [(1, 40), (5, 33), (64, 64), (33, 200), (1, 1), (17, 17), (3, 90)]
backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
trees_too = pytest.mark.parametrize("trees", [False, True])


def packed(trees: bool, **options: Any) -> Step:
    """Make a pack of `MIXED`, or of chains and trees."""
    return make_pack(CHAINS_AND_TREES if trees else MIXED, trees=trees, **options)


@dtypes
@backends
def test_matches_the_reference(backend: str, dtype: torch.dtype) -> None:
    check(backend, make_pack(DECODE, dtype=dtype))
    for trees in (False, True):
        check(backend, packed(trees, dtype=dtype))


@trees_too
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (7, 1), (12, 1), (20, 1)])
@backends
def test_any_ratio_of_heads(backend: str, heads: int, kv_heads: int, trees: bool) -> None:
    check(backend, packed(trees, heads=heads, kv_heads=kv_heads))


@dtypes
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 64, 72, 80, 96, 120, 128, 192, 256, 288])
@backends
def test_any_head_dim(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    check(backend, make_pack([(1, 50), (20, 70)], head_dim=head_dim, dtype=dtype))


@trees_too
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64])
@backends
def test_any_block_size(backend: str, block_size: int, trees: bool) -> None:
    check(backend, packed(trees, block_size=block_size, head_dim=40))


@trees_too
@pytest.mark.parametrize("window", [None, 1, 3, 7, 16, 50, 600])
@pytest.mark.parametrize("softcap", [None, 5.0])
@backends
def test_window_and_soft_cap(backend: str, window: int | None, softcap: float | None, trees: bool) -> None:
    """In a tree, windows count depths."""
    check(backend, packed(trees), window, softcap)


@dtypes
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (None, 5.0), (50, 5.0)])
@backends
def test_sinks(backend: str, softcap: float | None, window: int | None, dtype: torch.dtype) -> None:
    """The weights of sinks range from none to nearly all, which would overflow as an exponential."""
    sinks = torch.tensor([-torch.inf, -1.0, 3.0, 200.0]).to(dtype)
    check(backend, make_pack([*MIXED, (3, 1100)], dtype=dtype), window, softcap, sinks)


@pytest.mark.parametrize(("dtype", "quantization"), CODED, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@backends
def test_quantized_rows(backend: str, head_dim: int, dtype: torch.dtype, quantization: str) -> None:
    coded: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    pack = make_pack([*MIXED, (1, 700)], head_dim=head_dim, **coded)
    check(backend, pack)
    check(backend, pack, 50, 5.0)
    if head_dim == 64:
        check(backend, packed(trees=True, **coded))


@backends
def test_masks_that_are_no_trees(backend: str) -> None:
    rng = random.Random(0)
    masks: list[Masks | None] = [[rng.getrandbits(row) | 1 << row for row in range(64)]]
    check(backend, with_masks(make_pack([(64, 200)]), masks))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (9, 4.0)])
@backends
def test_a_tree_that_grows_by_a_few_rows_or_one_at_a_time(
    backend: str, window: int | None, softcap: float | None
) -> None:
    """The last rows alone, over the keys of an earlier forward, give the same as among all rows."""
    masks = tree_masks(40, 1)
    pack = with_masks(make_pack([(40, 530)]), [masks])
    whole = run(backend, pack, window=window, softcap=softcap)
    for first in (33, 39):
        last = with_masks(part_of(pack, slice(first, 40), 530), [masks[first:]], first)
        found = run(backend, last, window=window, softcap=softcap)
        torch.testing.assert_close(found, whole[first:])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 4.0)])
@trees_too
@backends
def test_no_row_sees_keys_before_the_first(
    backend: str, trees: bool, window: int | None, softcap: float | None
) -> None:
    lengths = [(1, 40), (1, 700), (5, 33), (24, 300), (30, 1300), (80, 81), (3, 90), (7, 7)]
    first_keys = [1, 600, 28, 1, 1270, 1, 0, 0]
    masks = [tree_masks(q, q) if trees and q < 64 else None for q, _ in lengths]
    pack = with_first_keys(make_pack(lengths), first_keys)
    pack = with_masks(pack, masks) if trees else pack
    check(backend, pack, window, softcap)


@backends
def test_long_context(backend: str) -> None:
    check(backend, make_pack([(1, 3000), (40, 1500), (2, 2049)], heads=4, kv_heads=2))
    check(backend, make_pack([(1, 3000), (40, 1500)], heads=4, kv_heads=2), window=700)


@backends
def test_scores_of_any_size(backend: str) -> None:
    """The exponentials of some scores overflow float32 unless the maximum is subtracted."""
    pack = make_pack(MIXED)
    pack.new[0].mul_(100)
    expected = reference(pack, 1.0)
    torch.testing.assert_close(run(backend, pack, scale=1.0).double(), expected, atol=1e-3, rtol=1e-3)


@trees_too
@backends
def test_padding_rows_write_nothing_and_give_zeros(backend: str, trees: bool) -> None:
    plain, padded = packed(trees), packed(trees, padding=9)
    before = padded.layer.keys.nan_to_num(9.0)
    out = run(backend, padded)
    assert torch.equal(out[:-9], run(backend, plain))
    assert not out[-9:].any()
    changed = (padded.layer.keys.nan_to_num(9.0) != before).flatten(2).any(-1)
    block, token = changed.nonzero().unbind(1)
    written = set((block * padded.case.shape.block_size + token).tolist())
    assert written == set(padded.metadata.slot_mapping.tolist()) - {-1}


@dtypes
@backends
def test_layers_with_different_shapes(backend: str, dtype: torch.dtype) -> None:
    """Layers of one step that differ in heads and head_dim give the same bits as each in its own pool."""
    shapes = [(4, 2, 64), (8, 2, 128), (8, 4, 128), (4, 2, 24), (4, 2, 64)]
    packs = [
        make_pack(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        for heads, kv_heads, head_dim in shapes
    ]
    sides = [side for pack in packs for side in (pack.layer.keys, pack.layer.values)]
    blocks = torch.cat([side.flatten(1) for side in sides], dim=1)
    places = blocks.split([side[0].numel() for side in sides], dim=1)
    placed = [place.unflatten(1, side.shape[1:]) for place, side in zip(places, sides, strict=True)]
    layers = [LayerKv(*each) for each in zip(placed[::2], placed[1::2], strict=True)]
    cls, _ = select_backend(blocks.device, dtype, backend)
    attention = cls(layers)
    attention.plan(packs[0].metadata)
    attention.begin_step(packs[0].metadata)
    for layer, pack in enumerate(packs):
        alone = run(backend, pack)
        assert torch.equal(attention.forward(layer, *pack.new, AttentionOptions(0.125)), alone)
    for side, alone in zip(placed, sides, strict=True):
        assert torch.equal(side.nan_to_num(9.0), alone.nan_to_num(9.0))


@dtypes
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "values_in_keys"),
    [(24, 16, False), (16, 40, False), (192, 128, False), (40, 33, False), (40, 24, True), (576, 512, True)],
)
@backends
def test_values_of_another_size_than_keys(
    backend: str, key_dim: int, value_dim: int, values_in_keys: bool, dtype: torch.dtype
) -> None:
    """They may be stored within the keys; then the given values are not read."""
    shape = Shape(dtype, "none", 1, 5, key_dim, value_dim, values_in_keys=values_in_keys)
    sequences = tuple(Sequence(*lengths, seed) for seed, lengths in enumerate(MIXED))
    step = Step.of(Case(shape, Options(1.0, 50, sinks=not values_in_keys), sequences, padding=2))
    expected = reference(step, key_dim**-0.5, 50, sinks=step.sinks)
    if values_in_keys:
        query, key, value = step.new
        step = replace(step, new=(query, key, torch.full_like(value, torch.nan)))
    out = step.run(select_backend(torch.device("cpu"), dtype, backend)[0])
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "quantization"), CODED, ids=str)
def test_all_backends_store_the_same_bytes(dtype: torch.dtype, quantization: str) -> None:
    """Also of values of another size than keys."""
    shape = Shape(dtype, quantization, key_dim=24, value_dim=40)
    sequences = tuple(Sequence(*lengths, seed) for seed, lengths in enumerate(MIXED))
    case, steps, outs = Case(shape, Options(1.0, 50), sequences), [], []
    for backend in BACKENDS:
        cls, _ = select_backend(torch.device("cpu"), dtype, backend)
        outs.append(Step.of(case).run(cls))
        step = Step.of(case)
        _, key, value = step.new
        key[0] *= 1e-32  # too small for a scale
        key[1] *= 1e30
        value[3, 1, 5] = torch.inf
        step.run(cls)
        steps.append(step)
    tolerance = CODED_TOLERANCE[dtype]
    for step, out in zip(steps, outs, strict=True):
        torch.testing.assert_close(out, outs[0], atol=tolerance, rtol=tolerance)
        for ours, theirs in zip(step.layer, steps[0].layer, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "quantization"), CODED, ids=str)
@backends
def test_every_code_is_read_as_its_value(backend: str, dtype: torch.dtype, quantization: str) -> None:
    """A row that sees only itself gives its value, which contains all codes at a scale of 1."""
    values = torch.arange(256, dtype=torch.uint8).view(CODE_DTYPES[quantization]).float()
    values = values.nan_to_num(0.0).clamp(min=-127 if quantization == "int8_row_scales" else -448).to(dtype)
    pack = make_pack([(1, 1)], kv_heads=1, head_dim=256, dtype=dtype, quantization=quantization)
    pack.new[2][0, 0] = values
    torch.testing.assert_close(run(backend, pack)[0], values.expand(4, -1), atol=0, rtol=1e-6)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernel needs a C++ compiler")
def test_rows_that_the_kernel_cannot_read_are_refused() -> None:
    layer = make_pack([(1, 1)], quantization="int8_row_scales").layer
    for rows in (None, KvRows(torch.float32), KvRows(torch.float16, "int8_row_scales")):
        with pytest.raises(ValueError, match=r"layers of torch.uint8 are not rows of"):
            CpuBackend([layer], rows=rows)


@backends
def test_strided_inputs(backend: str) -> None:
    """Fused projections and transposed rotary embeddings produce such rows."""
    plain = make_pack(MIXED)
    query, key, value = plain.new
    heads, kv_heads = query.shape[1], key.shape[1]
    fused = torch.cat(plain.new, dim=1)
    rotated = fused[:, heads : heads + kv_heads].transpose(0, 1).contiguous().transpose(0, 1)
    strided = replace(plain, new=(fused[:, :heads], rotated, fused[:, heads + kv_heads :]))
    expected = run(backend, plain)
    assert torch.equal(run(backend, strided), expected)
    apart = [each.permute(2, 0, 1).contiguous().permute(1, 2, 0) for each in (query, value)]
    torch.testing.assert_close(run(backend, replace(plain, new=(apart[0], rotated, apart[1]))), expected)


def test_a_coded_row_is_within_half_a_step_of_its_values() -> None:
    rows = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)) * 5
    top = rows.abs().amax(-1, keepdim=True)
    for name, share in (("int8_row_scales", 0.5 / 127), ("fp8_row_scales", 1 / 28)):  # steps of 32 below 448
        kept = KvRows(torch.float32, name)
        stored = kept.encode(rows)
        assert stored.scales is not None and stored.scales.shape == rows.shape[:-1]
        assert stored.values[0, 0].nbytes + stored.scales[0, 0].nbytes == kept.row_bytes(32) == 36
        assert ((kept.decode(stored) - rows).abs() <= top * share * 1.001).all()
        assert kept.decode(stored)[rows.abs() == top].abs().allclose(top.flatten())
        for head_dim in (6, 30, 516):
            assert f"{head_dim} values in a head" in (kept.fault(head_dim) or "")
    assert KvRows(torch.float32).fault(6) is None
