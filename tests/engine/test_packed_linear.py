"""Packed linear layers: right to bfloat16's last bit, and the same bits in every batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deploy.config import load_config
from engine.engine import Engine
from engine.linear import packed
from engine.linear.packed import PackedLinear, kernel_fault, pack_linears
from models.bundled import BUNDLED_MODEL
from native import build
from native.openmp import gomp_parallel
from protocol.outputs import TokenLogprobs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    kernel_fault(CPU, torch.bfloat16) is not None, reason="this machine has no such kernel"
)


KERNELS = ["tandem_linear", "tandem_linear_in_pairs", "tandem_linear_in_floats"]
EMULATED = Path(__file__).parent / "emulated" / "product.cpp"
EMULATING = [*build._FLAGS, f"-I{EMULATED.parent}", "-O1"]  # the compiler takes a third of -O3's time
HAS_PAIRS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()


@functools.cache
def emulated(name: str) -> Any:
    """The kernels for AMX-BF16 and AVX512-BF16, with these instructions in plain C++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", EMULATING)
        function = getattr(build.load_library(EMULATED), name)
    function.argtypes = packed._kernel().argtypes  # type: ignore[attr-defined]
    function.restype = None
    return function


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to multiply that the CPU has, also where a faster one would be chosen."""
    if request.param == "tandem_linear_in_pairs" and not HAS_PAIRS:
        pytest.skip("this CPU can't multiply pairs of bfloat16")
    chosen = packed._kernel(request.param)
    monkeypatch.setattr(packed, "_kernel", lambda: chosen)


@pytest.fixture(params=[*KERNELS, "emulated tandem_linear", "emulated tandem_linear_in_pairs"])
def any_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to multiply, on any CPU: the first takes AMX only where there is AMX."""
    *how, name = request.param.split()
    if name == "tandem_linear_in_pairs" and not (how or HAS_PAIRS):
        pytest.skip("this CPU can't multiply pairs of bfloat16; the emulated ones are tested")
    chosen = emulated(name) if how else packed._kernel(name)
    monkeypatch.setattr(packed, "_kernel", lambda: chosen)


def layers(in_features: int, out_features: int, bias: bool = True) -> tuple[nn.Linear, PackedLinear]:
    torch.manual_seed(in_features + out_features)
    linear = nn.Linear(in_features, out_features, bias=bias).bfloat16()
    return linear, PackedLinear(linear)


@pytest.mark.usefixtures("any_kernel")
@pytest.mark.parametrize("out_features", [1, 15, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("in_features", [2, 34, 512])
def test_a_product_is_the_exact_one_rounded(in_features: int, out_features: int) -> None:
    for bias in (False, True):
        linear, ours = layers(in_features, out_features, bias)
        for rows in (1, 5, 6, 7, 16, 17, 32, 33, 200, 500):
            x = torch.randn(rows, in_features).bfloat16()
            exact = x.double() @ linear.weight.double().T
            if bias:
                exact += linear.bias.double()
            scale = x.double().abs() @ linear.weight.double().abs().T + 1
            error = (ours(x).double() - exact).abs()
            assert (error <= exact.abs() * 2**-8 + scale * 2**-20).all(), (rows, bias)


@pytest.mark.usefixtures("any_kernel")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_depend_neither_on_its_batch_nor_on_the_threads(threads: int) -> None:
    _, ours = layers(256, 300)
    x = torch.randn(400, 256).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([ours(row) for row in x.split(1)])
        torch.set_num_threads(threads)
        for rows in (2, 3, 5, 6, 7, 11, 16, 17, 40, 192, 193, 400):
            together = torch.cat([ours(some) for some in x.split(rows)])
            assert torch.equal(together, alone), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("any_kernel")
def test_inputs_of_any_layout_and_batch_shape() -> None:
    _, ours = layers(64, 32)
    x = torch.randn(64, 3, 5).bfloat16()
    turned = x.permute(1, 2, 0)
    assert torch.equal(ours(turned), ours(turned.contiguous().view(15, 64)).view(3, 5, 32))
    assert ours(x.new_empty(1, 0, 64)).shape == (1, 0, 32)
    for wrong in (torch.randn(2, 64), torch.randn(2, 66).bfloat16()):
        with pytest.raises(ValueError, match="64 features"):
            ours(wrong)


@pytest.mark.usefixtures("any_kernel")
def test_what_is_no_number_stays_so() -> None:
    _, ours = layers(64, 80)
    x = torch.randn(3, 64).bfloat16()
    sound = ours(x)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    out = ours(x)
    assert torch.equal(out[0], sound[0])
    assert out[1].isnan().all()
    assert out[2].isinf().all()


@pytest.mark.parametrize("out_features", [1, 63, 64, 200])
@pytest.mark.parametrize("in_features", [1, 64, 65, 512])
def test_a_product_of_float32_is_the_exact_one_and_its_rows_have_the_same_bits_in_every_batch(
    in_features: int, out_features: int
) -> None:
    torch.manual_seed(in_features + out_features)
    weight, bias, x = (
        torch.randn(out_features, in_features),
        torch.randn(out_features),
        torch.randn(200, in_features),
    )
    kernel, values = packed._kernel(packed._FUNCTIONS[torch.float32]), packed.pack(weight, together=1)

    def multiply(rows: torch.Tensor, bias: torch.Tensor | None, threads: int = 1) -> torch.Tensor:
        out = torch.empty(len(rows), out_features)
        added = None if bias is None else bias.data_ptr()
        sizes = len(rows), in_features, out_features, threads
        kernel(rows.data_ptr(), values.data_ptr(), added, out.data_ptr(), *sizes, gomp_parallel())
        return out

    for added in (None, bias):
        whole = multiply(x, added, threads=2)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        scale = x.double().abs() @ weight.double().abs().T + 1
        assert ((whole.double() - exact).abs() <= scale * 2**-20).all()
        for rows in (1, 2, 5, 6, 7, 64):
            assert torch.equal(torch.cat([multiply(some, added) for some in x.split(rows)]), whole), rows


def test_only_plain_bfloat16_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(8, 8),
            "odd": nn.Linear(7, 8),
            "special": Special(8, 8),
            "inner": nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU()),
        }
    ).bfloat16()
    model["float32"] = nn.Linear(8, 8)
    assert pack_linears(model) == 2
    assert isinstance(model["plain"], PackedLinear) and isinstance(model["inner"][0], PackedLinear)
    assert {type(model[name]) for name in ("odd", "float32", "special")} == {nn.Linear, Special}


def test_what_multiplies_instead_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "float32" in (kernel_fault(CPU, torch.float32) or "")
    assert "cuda" in (kernel_fault(torch.device("cuda"), torch.bfloat16) or "")
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    packed._kernel.cache_clear()
    try:
        assert "false" in (kernel_fault(CPU, torch.bfloat16) or "")
    finally:
        packed._kernel.cache_clear()


def logprobs(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[TokenLogprobs]]:
    for request in requests:
        engine.add(request)
    found: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for output in engine.step().outputs:
            found[output.request_id] += output.logprobs or []
    return found


@pytest.mark.usefixtures("kernel")
def test_a_whole_model_gives_the_same_bits_alone_and_in_a_crowd() -> None:
    """In bfloat16, through prefill chunks of different cuts and batches that grow and shrink."""
    flags = {"model": str(BUNDLED_MODEL), "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    config = load_config(
        flags | {"compile": "off", "max_num_batched_tokens": 96, "max_num_seqs": 64}, environ={}
    )
    engine = Engine(config)
    requests = [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=[(index * 131 + place * 17) % 4000 + 5 for place in range(20 + 23 * index)],
            sampling=SamplingParams(
                max_tokens=12 + index, ignore_eos=True, temperature=0.8, seed=index, logprobs=3
            ),
            cache_salt=f"{index}",
        )
        for index in range(8)
    ]
    crowd = logprobs(engine, requests)
    for request in requests[::3]:
        engine = Engine(load_config(flags | {"compile": "off"}, environ={}))
        assert logprobs(engine, [request])[request.request_id] == crowd[request.request_id]
