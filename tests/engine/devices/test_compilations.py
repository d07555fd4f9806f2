"""No kernel is compiled after the start: each launch has a form that the warm-up has launched.

A form is Triton's key of a launch: types, alignments and special values of arguments. The GPU is simulated by
tensors without memory, whose addresses are their offsets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton", reason="Triton is for Linux")

from triton import knobs
from triton.knobs import CompileTimes
from triton.runtime.jit import JITFunction, compute_cache_key

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.copies import Downloader
from engine.devices import recurrent
from engine.devices.cuda import runner as cuda_runner
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.experts import tile_experts
from engine.devices.cuda.products import tile_linears
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.load import select
from engine.sampler import Sampler
from engine.sampler.triton_kernel import chooser
from engine.sampler.triton_kernel.chooser import TritonSampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from engine.triton_support import Compilations
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig, Verification
from speculation.tree_growth import TREE_WIDTH, TreeGrowth
from speculation.verification import on_device
from tests.docs.gpu_table import tree_inputs
from tests.e2e.architectures import config_of
from tests.engine.absent_gpu import GPU, AbsentGpu, absent_gpu
from tests.engine.interpreted.cases import Case
from tests.engine.interpreted.cases import Step as InterpretedStep
from tests.engine.interpreted.recorder import pageable_memory
from tests.engine.launches import FAMILIES, loaded_of
from tests.engine.step.test_host_waits import (
    CountedGraphs,
    adapters_of,
    hybrid,
    hybrid_pool,
    on_gpu,
    pool_of,
    qwen3,
)
from tests.engine.step.test_host_waits import loaded_of as loaded_qwen3
from tests.engine.triton_offline import absent_driver
from tests.gpu.test_kernels import small_steps

Forms = set[tuple[str, str]]
STEPS = int(os.environ.get("RANDOM_STEPS", "60"))
"""Steps of each kind: `RANDOM_STEPS=420` makes 10,080 of all kinds, in half a minute."""
LONGEST = 2048


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forms]:
    """Collect the forms of launches, without compiling or running any."""
    seen: Forms = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _, keys, _, _, binder = kernel.device_caches[90]
        kwargs["debug"] = kwargs["instrumentation_mode"] = ""
        _, specialization, options = binder(*args, **kwargs)
        seen.add((kernel.fn.__name__, compute_cache_key(keys, specialization, options)))

    monkeypatch.setattr(cuda_runner, "CudaGraphs", lambda device: CountedGraphs(AbsentGpu()))
    monkeypatch.setattr(select, "backend_for", lambda *_: (TritonBackend, ""))
    monkeypatch.setattr(JITFunction, "run", run)
    with absent_driver(90), torch.inference_mode():
        yield seen


def random_batch(rng: random.Random, kind: str, num_tables: int) -> list[SequenceRows]:
    """Decode rows, drafts to verify and prompts of any lengths, at any places of texts."""
    batch = []
    for number in range(rng.choice([1, 1, 2, 3, 4, 7, 16, rng.randint(1, 24)])):
        rows = rng.choice([1, 1, 2, 3, rng.randint(1, 90), rng.randint(1, 300) if number == 0 else 1])
        start = rng.choice([0, rng.randint(0, 60), rng.randint(0, 1500)])
        masks = None
        if kind == "trees" and rows <= 8 and rng.random() < 0.5:
            masks = [1 | 1 << row for row in range(rows)]
        batch.append(
            SequenceRows(
                [5] * rows,
                start,
                [[number] * (1 + (start + rows) // 16)] * num_tables,
                masks,
                adapter=rng.randint(0, 1) if kind == "adapters" else 0,
                state_slot=number % 3,
            )
        )
    return batch


def runner_for(kind: str, enforce_eager: bool) -> tuple[Any, KVPool]:
    """Return a runner of a kind or of a family, and its pool."""
    speculative = None
    if kind == "trees":
        speculative = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=3, tree=True)
    elif kind == "plain":
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    config = ServeConfig(max_num_seqs=24, speculative_config=speculative, enforce_eager=enforce_eager)
    with absent_gpu():
        if kind in FAMILIES:
            loaded = loaded_in_tables(FAMILIES[kind])
            state = () if loaded.recurrent is None else (loaded.recurrent.state, 3)
            pool = KVPool(PoolLayout((loaded.kv_group,), 16, *state), 64, GPU, None)
        elif kind == "hybrid":
            loaded = hybrid()
            pool = hybrid_pool(loaded)
        elif kind == "experts":
            model, pool = on_gpu(config_of("qwen3_moe", num_hidden_layers=1)), pool_of(1)
            tile_experts(model, torch.bfloat16)
            loaded = loaded_qwen3(model, pool)
        else:
            model, pool = qwen3(1), pool_of(1)
            if kind == "tiles":
                tile_linears(model, torch.bfloat16, plain=True)
            loaded = loaded_qwen3(model, pool, adapters_of(model) if kind == "adapters" else None)
        loaded = replace(loaded, max_model_len=LONGEST)
        return select.runner_of_one_process(config, loaded, pool, ()), pool


def loaded_in_tables(model_type: str) -> LoadedModel:
    """Return a small model. Layers with sliding windows have block tables of their own, as in service."""
    loaded = loaded_of(model_type)
    if loaded.recurrent is not None:
        return loaded
    return replace(loaded, kv_group=loaded.kv_group.in_tables(LONGEST))


KINDS = ["plain", "tiles", "experts", "adapters", "trees", "hybrid"]
CASES = [(kind, eager) for kind in KINDS for eager in (False, True)] + [(name, False) for name in FAMILIES]


@pytest.mark.parametrize(("kind", "enforce_eager"), CASES)
def test_steps(kind: str, enforce_eager: bool, forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "triton_fault", lambda device: None)
    (runner, pool), rng = runner_for(kind, enforce_eager), random.Random(kind)
    with pageable_memory():
        runner.warm_up()
        warm = set(forms)
        for _ in range(STEPS):
            batch = random_batch(rng, kind, pool.num_tables)
            runner.run(Step(batch, range(rng.randint(1, sum(len(rows.token_ids) for rows in batch)))))
    assert forms - warm == set()


@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_samples_and_verdicts(rule: Verification, forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary whose rows begin anywhere."""
    monkeypatch.setattr(
        Downloader, "begin", lambda self, values: partial(torch.zeros, values.shape, dtype=int)
    )
    monkeypatch.setattr(chooser, "LISTS_BYTES", 1 << 18)
    rng, size = random.Random(rule), 1003
    with pageable_memory():
        sampler = Sampler(size, GPU, [0], row_sampler=TritonSampler(GPU))
        sampler.warm_up(torch.bfloat16)
        on_device.warm_up(sampler, torch.bfloat16, rule)
        warm, every = set(forms), torch.empty(400, size, dtype=torch.bfloat16, device=GPU)
        for _ in range(STEPS):
            sequences = [
                random_sequence(rng, number) for number in range(rng.choice([1, 2, rng.randint(1, 40)]))
            ]
            rows, first = [sequence.sampling_row() for sequence in sequences], rng.randint(0, 9)
            sampler.tokens(every[first : first + len(rows)], rows)
            sampler.draw_drafts(every[first : first + len(rows)], rows, [0] * len(rows))
            count = sum(1 + (each.draft.num_nodes if each.draft else 0) for each in sequences)
            on_device.verify(sequences, every[first : first + count], sampler, rule)
            for sequence in sequences:
                sampler.forget(sequence.request_id)
    assert forms - warm == set()


def random_sequence(rng: random.Random, number: int) -> SequenceState:
    sampling = SamplingParams(
        max_tokens=9,
        temperature=rng.choice([0.0, 1.0]),
        top_k=rng.choice([0, 1, 20]),
        top_p=rng.choice([1.0, 0.9]),
        logit_bias=rng.choice([{}, {}, {rng.randrange(9): 1.0}]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
    )
    prompt, output = ([1] * rng.randint(1, 40) for _ in range(2))
    request = EngineRequest(
        request_id=str(number), prompt_token_ids=prompt, output_token_ids=output, sampling=sampling
    )
    sequence = SequenceState(request, number)
    if count := rng.randint(0, 6):
        sequence.draft = Draft([3] * count)
    return sequence


def test_growing_trees(forms: Forms) -> None:
    def upload(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.empty(array.shape, dtype=torch.int64, device=GPU) for array in arrays]

    def grow(trees: int, most: int, depth: int) -> None:
        growth = TreeGrowth([most] * trees, TREE_WIDTH, 16, upload, by_kernels=True)
        rows = trees
        for _ in range(depth):
            best = torch.empty(rows, TREE_WIDTH, device=GPU)
            level = growth.grow(best, best.long())
            rows = trees * level.num_rows
            level.before(torch.empty(trees * level.num_before, 64, dtype=torch.bfloat16, device=GPU))
            level.fill(tree_inputs(rows))
        best = torch.empty(rows, TREE_WIDTH, device=GPU)
        growth.end(best, best.long())

    grow(1, 1, 1)
    warm, rng = set(forms), random.Random(0)
    for _ in range(STEPS // 3):
        grow(rng.randint(1, 64), rng.randint(1, 63), rng.randint(1, 6))
    assert forms - warm == set()


def test_small_steps_of_a_gpus_first_run_have_few_forms(forms: Forms) -> None:
    """Triton takes seconds for each, and the report of a GPU is to be there in ten minutes."""

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(small_steps())
    def launch(case: Case) -> None:
        InterpretedStep.of(case).to(GPU).run(TritonBackend)

    launch()
    assert len(forms) <= 50


def test_compilations_after_the_start_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    counted = Compilations()
    try:
        listener = knobs.compilation.listener
        assert listener is not None
        times = CompileTimes(ir_initialization=0, lowering_stages=[("ptx", 1_500_000)], store_results=0)
        source: Any = SimpleNamespace(name="attend")
        listener(src=source, metadata={}, metadata_group={}, times=times, cache_hit=False)
        expected = {"kernel_compilations_total": 1, "kernel_compilation_seconds_total": 1.5}
        assert counted.totals() == expected
        assert "kernel attend was compiled after the start, in 1.50 s" in caplog.text
    finally:
        knobs.compilation.listener = None
