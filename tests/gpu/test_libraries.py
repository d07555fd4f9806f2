"""Libraries' kernels on the GPU at hand, if they are installed and it is one of theirs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.attention import flash
from engine.devices.cuda.attention.flash import FlashBackend
from engine.devices.cuda.fp8_products import Fp8Product
from engine.devices.cuda.library_products import by_library, library_fault
from engine.devices.cuda.marlin import MarlinProduct
from engine.devices.torch.attention import TorchBackend
from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat
from tests.engine.interpreted.cases import Case, Options, Shape, Step
from tests.gpu.test_kernels import LONG

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
WEIGHTS = [(CodeFormat.INT4, 32), (CodeFormat.INT4, 128), (CodeFormat.FP8, 2560), (CodeFormat.FP8, 128)]


@pytest.mark.parametrize(("format", "group"), WEIGHTS, ids=str)
def test_products(format: CodeFormat, group: int) -> None:
    torch.manual_seed(0)
    weight = round_to_nearest(torch.randn(320, 2560, device=CUDA), format, group)
    kind = MarlinProduct if format is CodeFormat.INT4 else Fp8Product
    library = kind.library_of(weight)
    assert library is not None
    if (fault := library_fault(library, CUDA, BF16)) is not None:
        pytest.skip(fault)
    layer = by_library([kind], weight, None, BF16)
    assert layer is not None, "its trial failed: see the log"
    for count in (1, 9, 200):
        rows = torch.randn(count, 2560, dtype=BF16, device=CUDA)
        expected = rows.double() @ weight.dequantized().double().T
        assert float((layer(rows).double() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [Options(), Options(sliding_window=700), Options(sliding_window=3, softcap=5.0)], ids=str
)
def test_chunks_of_prompts(dim: int, options: Options) -> None:
    if (fault := FlashBackend.fault(CUDA, BF16)) is not None:
        pytest.skip(fault)
    assert flash._passes(dim, CUDA, BF16), "its trial failed: see the log"
    step = Step.of(Case(Shape(BF16, key_dim=dim, value_dim=dim), options, LONG, padding=2))
    expected = step.in_float64().run(TorchBackend)
    found = step.to(CUDA).run(FlashBackend).cpu()
    torch.testing.assert_close(found.double(), expected, atol=1.6e-2, rtol=1.6e-2)
