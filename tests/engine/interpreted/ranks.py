"""The CUDA decoder on tensor-parallel ranks, in Triton's interpreter: its bits are those of one rank."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig

from engine.batch.runner import Runner, Step
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.experts import RoutedTiles, tile_experts, tiled_part
from engine.devices.cuda.products import tile_linears
from engine.devices.cuda.runner import CudaRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.linear.experts import ExpertsModule, join_experts, split_experts
from engine.load.rounding import round_layers
from engine.lora.table import Adapters, adaptable
from engine.model.describe import describe
from engine.model.program import ModelProgram
from engine.parallel.group import Columns, Ranks
from engine.parallel.pools import rank_layout
from engine.parallel.program_share import program_share
from engine.quantization.weight import CodeFormat
from tests.engine.adapter_files import write_adapter
from tests.engine.interpreted.decoder import CONFIGS, CPU, HIDDEN_LAYERS, STEPS, made
from tests.engine.interpreted.decoder import SHAPE as DECODER_SHAPE


class TurnRanks(Ranks):
    """Ranks in threads, of which one runs at a time: the interpreter is for one thread."""

    def __init__(self, rank: int, parts: list[Any], meeting: threading.Barrier, turn: threading.Lock) -> None:
        super().__init__(len(parts), rank)
        self._parts, self._meeting, self._turn = parts, meeting, turn

    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        self._parts[self.rank] = part.clone()
        self._meet()
        whole = torch.cat(self._parts, dim=-1)
        assert whole.shape[-1] == columns.width
        self._meet()
        return whole

    def _meet(self) -> None:
        self._turn.release()
        self._meeting.wait(60)
        self._turn.acquire()

    def give_up(self) -> None:
        raise NotImplementedError


def runner_of(program: ModelProgram, pool: KVPool, adapters: Adapters, adapter: Path) -> Runner:
    """Make a runner with an adapter in slot 1."""
    backend = TritonBackend(pool.layers(TARGET), rows=pool.groups[TARGET].rows)
    adapters.acquire(adapters.load("one", str(adapter)))
    decoder = CudaDecoder(program, backend, 128, HIDDEN_LAYERS, adapters)
    buckets = Buckets([1, 2, 4], [1, 3], [1, 2], trees=True, adapters=True)
    return CudaRunner(decoder, backend, CPU, "", buckets)


SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"hidden_size": 64, "intermediate_size": 96}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [1]}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 5, "attention_bias": True, "sliding_window": 4}
MODELS = {
    "gpt_oss": GptOssConfig(**DECODER_SHAPE | SHAPE | SIZES | GPT_OSS),
    "llama": CONFIGS["llama"],
    "gemma3": CONFIGS["gemma3"],
    "qwen3_moe": Qwen3MoeConfig(**CONFIGS["qwen3"].to_dict() | SHAPE | SIZES | MOE),
    "qwen2_moe": Qwen2MoeConfig(
        **DECODER_SHAPE | SHAPE | SIZES | MOE | {"shared_expert_intermediate_size": 192}
    ),
}


CASES = [
    ("llama", 2, 1, None),
    ("gemma3", 4, 1, None),
    ("qwen3_moe", 2, 0, None),
    ("qwen3_moe", 2, 0, CodeFormat.INT4),
    ("qwen2_moe", 2, 0, None),
    ("gpt_oss", 2, 0, None),
    ("gpt_oss", 2, 0, CodeFormat.MXFP4),
]


@pytest.mark.parametrize(("name", "size", "slot", "format"), CASES)
def test_ranks_have_the_bits_of_one(
    name: str, size: int, slot: int, format: CodeFormat | None, tmp_path: Path
) -> None:
    """The second sequence has the adapter in the slot, if it is not 0. Experts have weights of the format."""
    steps = [[step[0], replace(step[1], adapter=slot)] for step in STEPS]
    config = copy.deepcopy(MODELS[name])
    for field, value in SHAPE.items():
        setattr(config, field, value)
    model = made(config)
    model.save_pretrained(tmp_path)
    if format is not None:
        split_experts(model, by_kernel=False)
        for module in [each for each in model.modules() if isinstance(each, ExpertsModule)]:
            round_layers(module, format)
        join_experts(model, partial(RoutedTiles.of, dtype=torch.float32))
    adapter, linears = write_adapter(tmp_path, tmp_path / "one", 1), adaptable(model)
    layout = PoolLayout((Group.uniform(TARGET, Segment(2, 2, 16, torch.float32)),), 16)
    parts, meeting, turn = [None] * size, threading.Barrier(size), threading.Lock()

    def run(rank: int) -> list[Any]:
        with turn:
            ranks = TurnRanks(rank, parts, meeting, turn)
            prepare = partial(tiled_part, dtype=torch.float32, plain=True)
            adapters = Adapters(linears, CPU, torch.float32, 64)
            share = program_share(describe(model), ranks, CPU, prepare, adapters)
            runner = runner_of(
                share, KVPool(rank_layout(layout, size, rank), 8, CPU, None), adapters, adapter
            )
            return [runner.run(Step(step, [1, 3])) for step in steps]

    with ThreadPoolExecutor(size) as threads:
        shared = list(threads.map(run, range(size)))
    tile_experts(model, torch.float32)
    tile_linears(model, torch.float32, plain=True)
    adapters = Adapters(linears, CPU, torch.float32, 64)
    whole = runner_of(describe(model), KVPool(layout, 8, CPU, None), adapters, adapter)
    for number, step in enumerate(steps):
        logits, hidden = whole.run(Step(step, [1, 3]))
        for outputs in shared:
            for own, alone in zip(outputs[number], (logits, hidden), strict=True):
                torch.testing.assert_close(own, alone, rtol=0, atol=0)
