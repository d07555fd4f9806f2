"""Properties of compiled Triton kernels that the interpreter does not show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.attention.backend import TritonBackend
from engine.kv.attention import AttentionOptions, LayerKv
from engine.kv.row_codes import KvRows
from tests.docs import gpu_table
from tests.docs.gpu_table import four_decode_rows, meta, stored
from tests.engine.triton_offline import Code, launches


@pytest.fixture(autouse=True)
def whole_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile whole kernels, without the table's records."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Code, "of", lambda kernel: kernel)


@pytest.mark.parametrize("name", ["Qwen3.5: gated delta rule", "Nemotron-H, Falcon-H1: Mamba2"])
def test_no_single_column_is_scanned(name: str) -> None:
    """Triton 3.6 does not compile that."""
    kernel: Any = gpu_table.code_of(name, 90)
    scanned = re.findall(r'"tt\.scan".*?\}\) : \(tensor<(\S+?)xf32>\)', kernel.asm["ttir"], re.DOTALL)
    assert scanned
    assert not [shape for shape in scanned if shape.endswith("x1")]


@pytest.mark.parametrize("quantization", ["int8_row_scales", "fp8_row_scales"])
@pytest.mark.parametrize("name", ["write", "rotate"])
def test_codes_are_rounded_like_on_other_devices(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product fused with its rounding could be rounded in the other direction."""
    if name == "write":
        kernel = written(quantization)
    else:
        monkeypatch.setitem(gpu_table.DECODER_KERNELS, "codes", (name, quantization))
        kernel = gpu_table.code_of("codes", 90)
    assert kernel.name == name
    assert re.search(r"\bmul\.(rn\.)?f32", kernel.asm["ptx"])
    assert "fma." not in kernel.asm["ptx"]


def written(quantization: str) -> Any:
    rows = KvRows(torch.bfloat16, quantization)
    layer = LayerKv.of_sides(*(stored(rows, 8, 128) for _ in range(2)))
    query, key, value = (meta(4, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
    with launches(90) as kernels:
        attention = TritonBackend([layer], rows=rows)
        attention.begin_step(four_decode_rows())
        attention.forward(0, query, key, value, AttentionOptions(0.1))
    return next(kernel for kernel in kernels if kernel.name == "write")
