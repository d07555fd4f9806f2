from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from engine.linear import packed, packed_quantized
from native import build

SOURCE = Path(packed.__file__).parent / "product.cpp"
EMULATED = Path(__file__).parents[1] / "emulated" / "product.cpp"
KERNELS: dict[str, tuple[Path, list[str], str]] = {
    "this CPU": (SOURCE, ["-march=native"], ""),
    "AVX512-BF16": (SOURCE, ["-march=cooperlake"], "avx512_bf16"),
    "AVX512": (SOURCE, ["-march=x86-64-v4"], "avx512vl"),
    "AVX2": (SOURCE, ["-march=x86-64-v3"], "avx2"),
    "emulated AMX": (EMULATED, ["-march=native", f"-I{EMULATED.parent}"], ""),
    "emulated AVX512-BF16": (EMULATED, ["-march=native", f"-I{EMULATED.parent}", "-DWITHOUT_AMX"], ""),
}
"""The source of each way to multiply, the compiler's options, and what the CPU must have."""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    source, options, _ = KERNELS[name]
    with pytest.MonkeyPatch.context() as patch:
        if name != "this CPU":
            patch.setattr(build, "_FLAGS", [*build._FLAGS, "-O1"])  # the compiler takes a third of -O3's time
        patch.setattr(build, "_NATIVE", options)
        return build.load_library(source)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select each way to multiply. The first uses AMX only if there is AMX."""
    needed = KERNELS[request.param][2]
    if needed not in build._cpu():
        pytest.skip(f"this CPU has no {needed}")
    monkeypatch.setattr(packed, "library", lambda: library(request.param))
    monkeypatch.setattr(packed_quantized, "library", lambda: library(request.param))
