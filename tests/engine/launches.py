"""Kernel launches of decode steps on a GPU, counted on tensors without memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices import recurrent
from engine.devices.cuda import runner as cuda_runner
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.experts import tile_experts
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.load import select
from engine.load.loader import load_model
from protocol.config import ServeConfig
from tests.e2e.architectures import ARCHITECTURES, GEMMA4_EXPERTS, HYBRIDS, config_of
from tests.engine.absent_gpu import GPU, absent_gpu
from tests.engine.step.test_host_waits import CountedGraphs

FAMILIES = {
    "Llama": "llama",
    "Qwen3-MoE": "qwen3_moe",
    "Gemma 3": "gemma3_text",
    "LFM2": "lfm2",
    "Qwen3.5": "qwen3_5_text",
    "Qwen3-Next": "qwen3_next",
    "Nemotron-H": "nemotron_h",
    "Kimi Linear": "kimi_linear",
    "gpt-oss": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
    "Gemma 4": "gemma4_text",
    "Gemma 4 with experts": "gemma4_text-experts",
}
"""The families' model types; what follows a dash tells variants apart."""
FIELDS = ARCHITECTURES | HYBRIDS | {"gemma4_text-experts": GEMMA4_EXPERTS}
LAYERS = 36


class Launches(NamedTuple):
    forward: str
    """The forward, as the log names it."""
    count: int
    """The launches of a decode step of a model of `LAYERS` layers, without a graph."""
    is_graph: bool
    """Whether such steps are graphs: one launch of the host."""


def launches_of(family: str) -> Launches:
    """Count from two depths, each a multiple of the family's pattern of layers."""
    fields = FIELDS[FAMILIES[family]]
    patterns = [value for value in fields.values() if isinstance(value, list)]
    layers = fields.get("num_hidden_layers", len(patterns[0]) if patterns else 3)
    counts = []
    for times in (1, 2):
        longer = {name: value * times for name, value in fields.items() if value in patterns}
        with served(FAMILIES[family], longer | {"num_hidden_layers": layers * times}) as (runner, batch, gpu):
            runner.run(Step(batch, [0, 1]))  # makes what is made once
            gpu.launches.clear()
            runner.run(Step(batch, [0, 1]))
            counts.append(sum(gpu.launches.values()))
            if times == 1:
                runner.warm_up()
                forward, captured = runner.choice.split(", ")
                gpu.launches.clear()
                runner.run(Step(batch, [0, 1]))
                is_graph = gpu.launches == {"graph": 1} and captured.endswith("graphs")
    return Launches(forward, round(counts[0] + (counts[1] - counts[0]) * (LAYERS / layers - 1)), is_graph)


def loaded_of(model_type: str, **changes: Any) -> LoadedModel:
    """Return a small model on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(model_type.split("-")[0], **FIELDS[model_type] | changes).save_pretrained(folder)
        loading = ServeConfig(
            model=folder, dtype="float16", device="cpu", max_model_len=96, load_format="dummy"
        )
        loaded = replace(load_model(loading), device=GPU)
    tile_experts(loaded.model, torch.float16)
    loaded.model.to(GPU)
    return loaded


@contextmanager
def served(model_type: str, changes: dict[str, Any]) -> Iterator[tuple[Any, list[SequenceRows], Any]]:
    """Yield a small model's runner, two decode rows, and the GPU that counts."""
    loaded = loaded_of(model_type, **changes)
    state = (loaded.recurrent.state, 3) if loaded.recurrent is not None else ()
    with pytest.MonkeyPatch.context() as patch, absent_gpu() as gpu:
        patch.setattr(recurrent, "triton_fault", lambda device: None)
        patch.setattr(select, "backend_for", lambda *_: (TritonBackend, ""))
        patch.setattr(cuda_runner, "CudaGraphs", lambda device: CountedGraphs(gpu))
        pool = KVPool(PoolLayout((loaded.kv_group,), 16, *state), 64, GPU, None)
        blocks = [[1, 2]] * len(pool.groups)
        batch = [SequenceRows([5], 20, blocks), SequenceRows([5], 30, blocks, state_slot=1)]
        yield select.runner_of_one_process(ServeConfig(max_num_seqs=2), loaded, pool, ()), batch, gpu


def row(family: str) -> str:
    """Return the family's row of docs/gpu.md."""
    found = launches_of(family)
    return f"| {family} | {found.forward} | {found.count} | {'yes' if found.is_graph else 'no'} |"
