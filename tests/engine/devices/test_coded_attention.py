"""Special cases of attention over quantized rows, which also run the tests of other rows."""

from __future__ import annotations

import pytest
import torch

from engine.devices.cpu.attention.backend import CpuBackend
from engine.kv.row_codes import CODE_DTYPES, KvRows
from tests.engine.attention_packs import BACKENDS, make_pack, run
from tests.engine.devices.test_attention_backends import CODED, MIXED, TOLERANCE

needs_kernel = pytest.mark.skipif("cpu" not in BACKENDS, reason="the CPU kernel needs a C++ compiler")


@needs_kernel
@pytest.mark.parametrize(("dtype", "quantization"), CODED, ids=str)
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
    """A row that sees only itself gives its value, which contains all codes at a scale of 1."""
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
