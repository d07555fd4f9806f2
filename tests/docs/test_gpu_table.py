"""What docs/gpu.md says of the kernels is what Triton makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux")

from tests.docs import gpu_table  # noqa: E402
from tests.docs.gpu_table import (  # noqa: E402
    ADAPTERS,
    KERNELS,
    PRODUCT_ROWS,
    RECURRENT,
    VARIANTS,
    code_of,
    head,
    row,
)
from tests.engine.triton_offline import DEVICES  # noqa: E402

TEXT = gpu_table.DOCUMENT.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if "(sm_" in line]
SAMPLES = [
    ("bf16, rows to verify", 90),
    ("gpt-oss, chunk", 80),
    ("int8 KV, rows to verify", 120),
    ("norms of heads, rotation, KV's writing in fp8", 90),
    ("greatest logits, with edits", 89),
    ("filters and choice", 90),
    ("block: what is accepted, and the draw", 80),
    ("a round of growth", 90),
    ("int4, groups of 128, zero points, 8 rows", 90),
    ("mxfp4, 512 rows", 90),
    ("to ranks, rank 64", 90),
    ("from ranks, and sums, rank 16", 80),
    ("Qwen3.5: gated delta rule", 90),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("name", "capability"), SAMPLES)
def test_what_becomes_of_a_kernel_is_what_the_table_says(name: str, capability: int) -> None:
    if head() not in TEXT:
        pytest.skip(f"the table is of another version than Triton {triton.__version__}")
    assert row(name, capability, code_of(name, capability)) in TEXT.splitlines(), (
        "run python -m tests.docs.gpu_table"
    )


def test_every_kernel_is_listed_for_every_gpu_and_fits_it() -> None:
    listed = [tuple(cells[:2]) for cells in ROWS]
    devices = [(capability, each) for capability, each in DEVICES.items()]
    expected = [
        (name, f"{each.name} (sm_{number})")
        for names in KERNELS
        for name in names
        for number, each in devices
    ]
    assert listed == expected
    for (name, gpu), cells in zip(listed, ROWS, strict=True):
        device = next(each for each in DEVICES.values() if gpu.startswith(each.name))
        registers, spills, shared, copies, products, programs = (int(cell.split()[0]) for cell in cells[2:])
        assert registers <= 255
        assert programs >= 1
        assert spills == 0
        assert shared << 10 <= device.shared_bytes
        if name in PRODUCT_ROWS:
            assert copies > 0 and products > 0
            continue
        if name in ADAPTERS:
            assert products > 0
            assert (copies > 0) == (ADAPTERS[name][0] == "shrink")
            continue
        if name in RECURRENT:
            assert (products > 0) == (RECURRENT[name][0] == "attend")
            continue
        variant = VARIANTS.get(name)
        assert (copies > 0) == (variant is not None)
        assert (products > 0) == (variant is not None and variant.dtype.itemsize == 2)
