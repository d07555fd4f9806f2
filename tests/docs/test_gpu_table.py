"""docs/gpu.md agrees with the kernels that Triton compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux")

from tests.docs import gpu_table  # noqa: E402
from tests.docs.gpu_table import (  # noqa: E402
    ADAPTERS,
    EXPERTS,
    LATENTS,
    PRODUCT_ROWS,
    RECURRENT,
    SECTIONS,
    VARIANTS,
    cell,
)
from tests.engine.triton_offline import DEVICES  # noqa: E402

TEXT = gpu_table.DOCUMENT.read_text()
CELLS = {
    cells[0]: cells[1:]
    for line in TEXT.splitlines()
    if line.startswith("| ") and " / " in line
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
SAMPLES = [
    ("bf16, rows to verify", 90),
    ("gpt-oss (head 64, window, sinks), rows to verify", 80),
    ("int8 KV, rows to verify", 120),
    ("head norms, rotary embedding, KV write in fp8", 90),
    ("top logits, with edits", 89),
    ("filters and choice", 90),
    ("block: acceptance and draw", 80),
    ("a round of growth", 90),
    ("int4, groups of 128, zero points, 8 rows", 90),
    ("mxfp4, 512 rows", 90),
    ("mxfp4 experts, 64 rows", 90),
    ("rows of each expert", 80),
    ("DeepSeek-V3: router, and rows of each expert", 90),
    ("shrink, rank 64", 90),
    ("expand and add, rank 16", 80),
    ("DeepSeek-V3: heads' queries for latents", 90),
    ("Qwen3.5: gated delta rule", 90),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("name", "capability"), SAMPLES)
def test_the_tables_figures_are_those_of_the_compiled_kernel(name: str, capability: int) -> None:
    if f"with Triton {triton.__version__};" not in TEXT:
        pytest.skip(f"the table is of another version than Triton {triton.__version__}")
    listed = CELLS[name][[*DEVICES].index(capability)]
    assert cell(name, capability) == listed, "run python -m tests.docs.gpu_table"


def test_every_kernel_is_listed_for_every_gpu_and_fits_it() -> None:
    assert list(CELLS) == [name for names, _ in SECTIONS for name in names]
    for name, cells in CELLS.items():
        for device, figures in zip(DEVICES.values(), cells, strict=True):
            registers, shared, copies, products, programs = map(int, figures.split(" / "))
            assert registers <= 255
            assert programs >= 1
            assert shared << 10 <= device.shared_bytes
            if name in PRODUCT_ROWS:
                assert copies > 0 and products > 0
                continue
            if name in EXPERTS:
                assert (products > 0) == (EXPERTS[name][0] in ("multiply", "route"))
                continue
            if name in ADAPTERS:
                assert products > 0
                assert (copies > 0) == (ADAPTERS[name][0] == "shrink")
                continue
            if name in LATENTS:
                assert (products > 0) == (copies > 0) == (LATENTS[name][0] == "multiply_heads")
                continue
            if name in RECURRENT:
                assert (products > 0) == (RECURRENT[name][0] == "attend")
                continue
            variant = VARIANTS.get(name)
            assert (copies > 0) == (variant is not None)
            assert (products > 0) == (variant is not None and variant.dtype.itemsize == 2)
