"""Families in the CUDA decoder, with its kernels in Triton's interpreter, against their programs by torch's
operators. `test_interpreted_kernels.py` runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder, unfit
from engine.devices.cuda.products import tile_linears
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.cuda.runner import CudaRunner
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.load.loader import load_model
from engine.model.describe import describe
from protocol.config import ServeConfig
from tests.e2e.architectures import write_model
from tests.engine.devices import test_program
from tests.engine.interpreted.graphs import CPU
from tests.engine.reference import reference

HIDDEN_LAYERS = 1, 2
MODELS = {
    name: test_program.MODELS[name]
    for name in (
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
        "falcon_h1",
        "falcon_h1-normed",
    )
}
"""Together they have all operations that a program may have."""


CASES = [(name, "float32", False) for name in MODELS]
CASES += [("kimi_linear", "float32", True), ("deepseek_v3", "float32", True)]
CASES += [
    (name, "bfloat16", False)
    for name in ("deepseek_v3-whole_queries", "qwen3_5_text", "bamba", "gemma4_text")
]
"""Without experts in bfloat16, as other rounding chooses others."""


@pytest.mark.parametrize(("name", "dtype", "in_tiles"), CASES)
def test_a_family_computes_what_its_program_does(
    name: str, dtype: str, in_tiles: bool, tmp_path: Path
) -> None:
    """In chunks, with another text, with drafts of which none is right, and as a tree."""
    write_model(folder=tmp_path, **{"model_type": name.split("-")[0]} | MODELS.get(name, {}))
    loaded = load_model(ServeConfig(model=str(tmp_path), dtype=dtype, device="cpu", max_model_len=96))
    for weight in loaded.model.parameters():
        if weight.ndim == 1:  # norms and biases that matter
            weight.data += 0.3 * torch.randn_like(weight)
    for name_of, buffer in loaded.model.named_buffers():
        if name_of.endswith("layer_scalar"):
            buffer.fill_(0.75)
    if in_tiles:
        tile_linears(loaded.model, torch.float32, plain=True)
    program = describe(loaded.model)
    assert unfit(program) is None
    state = None if loaded.recurrent is None else loaded.recurrent.state.with_drafts(16)
    pools = [KVPool(PoolLayout((loaded.kv_group,), 16), 12, CPU, None) for _ in range(2)]
    slots = [None if state is None else StateSlots(state, 2, CPU) for _ in pools]
    theirs, ours = (backend_over(TritonBackend, pool.layers(TARGET), pool.groups[TARGET]) for pool in pools)
    operators = None if slots[1] is None else TritonOperators(slots[1])
    layers = () if state is None else state.layers
    decoder = CudaDecoder(program, ours, 96, HIDDEN_LAYERS, operators=operators, recurrent=layers)
    buckets = Buckets([2], [1, 4], [6], trees=True)
    runners = (
        reference(loaded.model, theirs, HIDDEN_LAYERS, slots[0]),
        CudaRunner(decoder, ours, CPU, "", buckets),
    )
    text = [(7 * place) % 290 + 3 for place in range(40)]
    blocks = [[list(range(first, first + 6))] for first in (0, 6)]
    batches = [
        [SequenceRows(text[:21], 0, blocks[0])],
        [SequenceRows(text[21:22], 21, blocks[0]), SequenceRows(text[30:37], 0, blocks[1], state_slot=1)],
        [SequenceRows([9, 8, 7], 22, blocks[0], certain=22), SequenceRows([5], 7, blocks[1], state_slot=1)],
        [SequenceRows([5, 6, 7, 8], 22, blocks[0], masks=[0b1, 0b11, 0b101, 0b1011], certain=23)],
    ]
    for batch in batches:
        step = Step(batch, range(sum(len(rows.token_ids) for rows in batch)))
        expected, found = (runner.run(step) for runner in runners)
        for wanted, got in zip(expected, found, strict=True):
            assert wanted is not None and got is not None
            if dtype == "bfloat16":
                assert (got - wanted).float().norm() < 0.15 * wanted.float().norm()
                continue
            scale = float(wanted.abs().max())
            torch.testing.assert_close(got / scale, wanted / scale, atol=1e-5, rtol=0)
