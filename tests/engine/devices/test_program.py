"""Programs by torch's operators, the reference for other executors, compared with Transformers' own
modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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
from tests.e2e.architectures import GEMMA4_EXPERTS, VOCAB_SIZE, write_model
from tests.engine.devices import test_decoder, test_hybrid_decoder, test_latent_attention
from tests.engine.devices.test_recurrent import needs_hooks
from tests.engine.kernels import CPU
from tests.engine.reference import reference

HIDDEN_LAYERS = 1, 3
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
}
_VALUES_OF_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
WITH_TORCH: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text-large": {**_GEMMA4, **_VALUES_OF_KEYS, "hidden_size_per_layer_input": 0},
    "gemma4_text-experts": GEMMA4_EXPERTS,
    "gemma4_unified_text": {**_GEMMA4, **_VALUES_OF_KEYS},
}
"""Models that the native decoder does not run: Gemma 4 with vectors of tokens for each layer and with layers
that share KV, as E2B, and with values made of keys, as 31B and 12B.
"""
MODELS: dict[str, dict[str, Any]] = (
    test_decoder.MODELS | test_hybrid_decoder.MODELS | test_latent_attention.MODELS | WITH_TORCH
)

pytestmark = needs_hooks


@pytest.mark.parametrize("name", MODELS)
def test_a_program_computes_the_same_as_the_modules(name: str, tmp_path: Path) -> None:
    """In chunks, with another text, and as a tree."""
    write_model(folder=tmp_path, **{"model_type": name.split("-")[0]} | MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for weight in model.parameters():
        if weight.ndim == 1:  # norms and biases with an effect
            weight.data += 0.3 * torch.randn_like(weight)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    model.save_pretrained(tmp_path)
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
