"""Families in the CUDA decoder, with its kernels in Triton's interpreter, against their programs by torch's
operators. `test_interpreted_kernels.py` runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder, unfit
from engine.devices.cuda.experts import tile_experts
from engine.devices.cuda.products import tile_linears
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch.attention import TorchBackend
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.load.loader import LoadedModel, load_model
from engine.model.describe import describe
from protocol.config import ServeConfig
from tests.engine.interpreted.graphs import CPU
from tests.engine.program_models import write
from tests.engine.reference import reference

HIDDEN_LAYERS = 1, 2
MODELS = [
    "llama-biases",
    "qwen2-narrow_heads",
    "qwen2-window",
    "qwen3",
    "granite",
    "gemma3_text",
    "mixtral",
    "gpt_oss",
    "qwen3_next",
    "lfm2_moe",
    "granite-experts",
    "bamba",
    "nemotron-experts",
    "kimi_linear",
    "deepseek_v3",
    "deepseek_v3-whole_queries",
    "gemma4_text",
    "gemma4_text-large",
    "gemma4_text-experts",
    "falcon_h1",
    "falcon_h1-normed",
]
"""Together they have all operations that a program may have."""
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "tiles": {"in_tiles": True},
    "int4 tiles": {"in_tiles": True, "quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
CASES = [
    *((name, "float32", "") for name in MODELS),
    *((name, "float32", "tiles") for name in ("qwen3", "kimi_linear", "deepseek_v3")),
    *(("qwen3", "float32", option) for option in ("int4 tiles", "int8 KV")),
    *(
        (name, "bfloat16", "")
        for name in ("deepseek_v3-whole_queries", "qwen3_5_text", "bamba", "gemma4_text")
    ),
]
"""Without experts in bfloat16, as other rounding chooses others."""
_ROUNDED = {"gpt_oss": 3e-5}
"""The most that other orders of summation in float32 change, of the greatest value; else 1e-5. Of KV in codes
a last bit may round to another one.
"""


def _loaded(folder: Path, dtype: Any, **options: Any) -> tuple[LoadedModel, KVPool, StateSlots | None]:
    config = ServeConfig(model=str(folder), dtype=dtype, device="cpu", max_model_len=96, **options)
    loaded = load_model(config)
    pool = KVPool(PoolLayout((loaded.kv_group,), 16), 12, CPU, None)
    if loaded.recurrent is None:
        return loaded, pool, None
    return loaded, pool, StateSlots(loaded.recurrent.state.with_drafts(16), 2, CPU)


def torch_runner(folder: Path, dtype: str, in_tiles: bool = False, **options: Any) -> Runner:
    loaded, pool, slots = _loaded(folder, dtype, **options)
    backend = backend_over(TorchBackend, pool.layers(TARGET), pool.groups[TARGET])
    return reference(loaded.model, backend, HIDDEN_LAYERS, slots)


def cuda_runner(folder: Path, dtype: str, in_tiles: bool = False, **options: Any) -> Runner:
    """Make a runner of a decoder as on a GPU, with experts in tiles, and `in_tiles` linear layers too."""
    loaded, pool, slots = _loaded(folder, dtype, **options)
    tile_experts(loaded.model, getattr(torch, dtype))
    if in_tiles:
        tile_linears(loaded.model, getattr(torch, dtype), plain=True)
    program = describe(loaded.model)
    assert unfit(program) is None
    backend = backend_over(TritonBackend, pool.layers(TARGET), pool.groups[TARGET])
    operators = None if slots is None else TritonOperators(slots)
    layers = () if slots is None else slots.layout.layers
    decoder = CudaDecoder(program, backend, 96, HIDDEN_LAYERS, operators=operators, recurrent=layers)
    return CudaRunner(decoder, backend, CPU, "", Buckets([2], [1, 4], [6], trees=True))


@pytest.mark.parametrize(("name", "dtype", "how"), CASES)
def test_a_family_computes_what_its_program_does(name: str, dtype: str, how: str, tmp_path: Path) -> None:
    """In chunks, with another text, with drafts of which none is right, and as a tree. In bfloat16 it is as
    far from the same weights' exact results as the program by torch's operators.
    """
    write(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    runners = [
        torch_runner(tmp_path, "float32", **OPTIONS[how]),
        cuda_runner(tmp_path, dtype, **OPTIONS[how]),
    ]
    most = 2e-2 if how == "int8 KV" else _ROUNDED.get(name, 1e-5)
    if dtype == "bfloat16":
        runners.append(torch_runner(tmp_path, dtype))
    text = [(7 * place) % 290 + 3 for place in range(40)]
    blocks = [[list(range(first, first + 6))] for first in (0, 6)]
    batches = [
        [SequenceRows(text[:21], 0, blocks[0])],
        [SequenceRows(text[21:22], 21, blocks[0]), SequenceRows(text[30:37], 0, blocks[1], state_slot=1)],
        [SequenceRows([9, 8, 7], 22, blocks[0], certain=22), SequenceRows([5], 7, blocks[1], state_slot=1)],
        [SequenceRows([5, 6, 7, 8], 22, blocks[0], masks=[0b1, 0b11, 0b101, 0b1011], certain=23)],
    ]
    errors = []
    for batch in batches:
        step = Step(batch, range(sum(len(rows.token_ids) for rows in batch)))
        for exact, *others in zip(*(runner.run(step) for runner in runners), strict=True):
            assert exact is not None
            scale = float(exact.abs().max())
            far = [(other - exact).flatten() / scale for other in others]
            if len(far) == 1:
                assert far[0].abs().max() < most
            errors.append(torch.stack(far))
    own, *by_torch = torch.cat(errors, dim=1).norm(dim=1).tolist()
    assert all(own < 1.3 * other for other in by_torch)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "qwen3_next", "granite-experts", "deepseek_v3", "gemma4_text-experts"]
)
def test_a_row_of_a_model_with_experts_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    """With `--deterministic`: alone, and beside so many rows that all tiles are larger."""
    write(name, tmp_path)
    runner = cuda_runner(tmp_path, "bfloat16", in_tiles=True)
    text = [(7 * place) % 290 + 3 for place in range(80)]
    own = SequenceRows(text[:5], 0, [list(range(6))])
    crowd = SequenceRows(text[::-1], 0, [list(range(6, 12))], state_slot=1)
    alone = runner.run(Step([own], range(5)))
    together = runner.run(Step([crowd, own], range(80, 85)))
    assert alone.hidden is not None and together.hidden is not None
    assert torch.equal(alone.logits, together.logits)
    assert torch.equal(alone.hidden, together.hidden[-5:])
