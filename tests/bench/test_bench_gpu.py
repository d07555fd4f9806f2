"""`tandem bench gpu` without a GPU: its arithmetic, its report, and its measurements on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

from bench.cli import app
from bench.gpu import model as bench_model
from bench.gpu import roofs
from bench.gpu.kernels import KernelComparison
from bench.gpu.measure import GpuPlan, Measured, Results, measure, speedup
from bench.gpu.model import SHAPES, DecoderShape, MadeUpModel
from bench.gpu.report import as_markdown, checks
from bench.gpu.roofline import Costs, StepCost, tokens_of
from bench.gpu.roofs import Roofs, measured, missing, roofs_of
from engine import assembly
from engine.kv.pool import KVPool
from tests.gpu.test_bench import SMALL

CPU = torch.device("cpu")
ROOFS = Roofs("a device", 1e12, 1e14, "made up")
TINY = DecoderShape(layers=2, hidden=64, mlp=96, heads=4, kv_heads=2, head_dim=16, vocabulary=320)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, words in ((None, "built without CUDA"), ("13.0", "finds no NVIDIA GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        result = CliRunner().invoke(app, ["gpu"])
        assert result.exit_code == 2
        assert words in result.output
        assert len(result.output.splitlines()) == 1


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert missing() == "Tesla T4 has compute capability 7.5, and the kernels need 8.0 (Ampere) or later"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert not missing()


@pytest.mark.parametrize("shape", [SMALL, *SHAPES.values()], ids=str)
def test_query_heads_must_be_a_multiple_of_kv_heads(shape: DecoderShape) -> None:
    """Attention needs a multiple of the KV heads."""
    assert shape.heads >= shape.kv_heads and shape.heads % shape.kv_heads == 0


def test_known_devices_have_the_data_sheets_limits() -> None:
    h100 = roofs_of("NVIDIA H100 80GB HBM3", ROOFS)
    assert (h100.bytes_per_s, h100.flops) == (3350e9, 989e12)
    assert roofs_of("NVIDIA X1", ROOFS) is ROOFS
    assert all("data sheet" in sheet or "paper" in sheet for *_, sheet in roofs._SHEETS.values())


def test_limits_are_measured_by_a_copy_and_a_product() -> None:
    found = measured("a CPU", CPU, copied_bytes=1 << 20, size=64)
    assert found.bytes_per_s > 0
    assert found.flops > 0


def test_a_step_reads_weights_and_keys_once_and_multiplies_each_row() -> None:
    costs = Costs(layer_weights=1000, head_weights=100, weight_bytes=2, kv_bytes=8, attended=10)
    decode = costs.step(sequences=4, rows_each=1, context=50, logits_each=1)
    assert decode == StepCost(2 * 1100 + 4 * 50 * 8, 2 * (4 * 1100 + 4 * 50 * 10))
    chunk = costs.step(sequences=1, rows_each=3, context=3, logits_each=1)
    assert chunk == StepCost(2 * 1100 + 3 * 8, 2 * (3 * 1000 + 100 + (1 + 2 + 3) * 10))
    assert StepCost(2 * 10**12, 10**14).least_s(ROOFS) == 2.0
    assert StepCost(2 * 10**12, 10**14).bound(ROOFS) == "memory"
    assert StepCost(10**12, 3 * 10**14).least_s(ROOFS) == 3.0
    assert StepCost(10**12, 3 * 10**14).bound(ROOFS) == "products"


def test_the_gain_of_drafts_at_a_given_acceptance() -> None:
    assert tokens_of(0, 0.7) == 1
    assert tokens_of(4, 1.0) == 5
    assert tokens_of(2, 0.5) == 1.75
    plain, chain = (Measured(2, rows, 64, rows * 0.5 + 0.5, 0.1, None, StepCost(1, 1)) for rows in (1, 3))
    other = Measured(1, 1, 64, 100.0, 0.1, None, StepCost(1, 1))
    results = Results("eager", [other, plain, chain], [], {}, [1.0] * 3)
    assert speedup(results, chain, 0.5) == 1.75 * 1.0 / 2.0


class CountedPools:
    """The pools of measurements, and the most that existed at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._made: list[StorageWeakRef] = []

    def make(self, *arguments: Any) -> KVPool:
        pool = KVPool(*arguments)
        self._made.append(StorageWeakRef(pool.memory.untyped_storage()))
        self.most = max(self.most, sum(not each.expired() for each in self._made))
        return pool


POOLS = CountedPools()


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeUpModel, GpuPlan, Results]:
    plan = GpuPlan([1, 3], [0, 2], [32, 48], context=64, acceptance=0.8, long_context=96, budget=32)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        for module in (bench_model, assembly):
            patch.setattr(module, "KVPool", POOLS.make)
        model = MadeUpModel(TINY, CPU, tmp_path_factory.mktemp("model"), plan.longest)
        return model, plan, measure(model, plan)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gpu_holds_one_pool_at_a_time() -> None:
    assert POOLS.most == 1


def test_everything_is_measured(on_the_cpu: tuple[MadeUpModel, GpuPlan, Results]) -> None:
    _, _, results = on_the_cpu
    assert [(each.sequences, each.rows_each) for each in results.decode] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert [(each.rows_each, each.context) for each in results.prefill] == [(32, 32), (48, 48)]
    assert results.steps.keys() == results.sampled_steps.keys() == {1, 3}
    assert results.cut_s.keys() == {48}
    assert results.mixed is not None
    assert (results.mixed.sequences, results.mixed.context) == (3, 96)
    assert len(results.eager_s) == len(results.decode)
    for each in (*results.decode, *results.prefill):
        assert 0 < each.host_s <= each.device_s
        assert each.launches is None


def test_the_cost_of_a_made_up_model(on_the_cpu: tuple[MadeUpModel, GpuPlan, Results]) -> None:
    model, _, _ = on_the_cpu
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    assert model.costs == Costs(
        layer_weights=2 * layer + 64,
        head_weights=64 * 320,
        weight_bytes=2,
        kv_bytes=2 * 2 * 2 * 16 * 2,
        attended=2 * 2 * 4 * 16,
    )


def test_shapes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TINY.nbytes(100) == 2 * (2 * (2 * 64 * 16 * 6 + 3 * 64 * 96) + 2 * 64 * 320 + 100 * 2 * 2 * 2 * 16)
    monkeypatch.setattr(roofs, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 24 << 30))
    result = CliRunner().invoke(app, ["gpu"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert re.search(r"they take 3\d GiB, and 20 GiB are free", result.output)


def test_the_report(on_the_cpu: tuple[MadeUpModel, GpuPlan, Results]) -> None:
    _, plan, results = on_the_cpu
    results = replace(results, kernels=[KernelComparison("attention", 2e-6, 1e-6)])
    text = as_markdown("tiny", ROOFS, Roofs("a device", 5e11, 2e13, ""), plan, results)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row[0] in ("| 1", "| 3", "| 32")]) == 5
    assert "Roofs (made up): memory 1000 GB/s, products 100 TFLOP/s." in text
    assert "reach memory 500 GB/s, products 20 TFLOP/s." in text
    assert "accepted with a chance of 0.8" in text
    assert "| attention | 2 | 1 | 0.50 |" in text
    assert "| pass | no kernel is compiled after the start (0 were) |" in text
    failed = replace(results, compilations={"kernel_compilations_total": 2.0}, eager_s=[0.0] * 4)
    assert [*checks(failed).values()][:2] == [False, False]
    head = next(row for row in rows if row[0] == "| requests")
    first = rows[rows.index(head) + 2]
    assert first[head.index("eager ms")] == f"{results.eager_s[0] * 1e3:.3f}"
    share = float(first[3])
    assert share == pytest.approx(
        results.decode[0].work.least_s(ROOFS) / results.decode[0].device_s, abs=0.01
    )
