"""What Triton makes of our kernels for a GPU, where the interpreter cannot tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from tests.docs import gpu_table
from tests.engine.triton_offline import Code


@pytest.fixture(autouse=True)
def whole_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of what the table says of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Code, "of", lambda kernel: kernel)


@pytest.mark.parametrize("name", ["Qwen3.5: gated delta rule", "Nemotron-H, Falcon-H1: Mamba2"])
def test_no_single_column_is_scanned(name: str) -> None:
    """Triton 3.6 does not compile that."""
    kernel: Any = gpu_table.code_of(name, 90)
    scanned = re.findall(r'"tt\.scan".*?\}\) : \(tensor<(\S+?)xf32>\)', kernel.asm["ttir"], re.DOTALL)
    assert scanned
    assert not [shape for shape in scanned if shape.endswith("x1")]
