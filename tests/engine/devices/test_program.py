"""Programs by torch's operators, the reference for other executors, compared with Transformers' own
modules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over
from engine.devices.torch.attention import TorchBackend
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.load.loader import load_model
from engine.load.select import build_runner
from protocol.config import ServeConfig
from tests.e2e.architectures import VOCAB_SIZE
from tests.engine.kernels import CPU
from tests.engine.program_models import MODELS, write
from tests.engine.reference import reference

HIDDEN_LAYERS = 1, 3


@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_the_same_as_the_modules(name: str, tmp_path: Path) -> None:
    """In chunks, with another text, and as a tree."""
    write(name, tmp_path)
    loaded = load_model(ServeConfig(model=str(tmp_path), dtype="float32", device="cpu", max_model_len=256))
    runners = []
    for is_reference in (True, False):
        pool = KVPool(PoolLayout((loaded.kv_group,), 16), 24, CPU, None)
        backend = backend_over(TorchBackend, pool.layers(TARGET), pool.groups[TARGET])
        slots = None
        if loaded.recurrent is not None:
            slots = StateSlots(loaded.recurrent.state.with_drafts(32), 3, CPU)
        if is_reference:
            runners.append(reference(loaded.model, backend, HIDDEN_LAYERS, slots).run)
        else:
            runners.append(build_runner(loaded, backend, "off", HIDDEN_LAYERS, slots).run)
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randint(3, VOCAB_SIZE, (2, 80), generator=generator).tolist()
    blocks = [[list(range(first, first + 8))] for first in (0, 8)]
    batches = [
        [SequenceRows(one[:40], 0, blocks[0])],
        [SequenceRows(one[40:41], 40, blocks[0]), SequenceRows(other[:20], 0, blocks[1], state_slot=1)],
        [SequenceRows([5, 6, 7, 8], 41, blocks[0], masks=[0b1, 0b11, 0b101, 0b1011], certain=42)],
    ]
    for batch in batches:
        wanted = [0, sum(len(rows.token_ids) for rows in batch) - 1]
        ours, theirs = (run(Step(batch, wanted)) for run in runners)
        for found, expected in ((ours.logits, theirs.logits), (ours.hidden, theirs.hidden)):
            assert found is not None and expected is not None
            scale = float(expected.abs().max())
            torch.testing.assert_close(found / scale, expected / scale, atol=1e-5, rtol=0)
