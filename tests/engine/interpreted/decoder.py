"""Small models in the CUDA decoder, with kernels in Triton's interpreter: products in several ways, padding.

`families.py` compares whole models.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen3Config

from engine.batch.runner import Step
from engine.batch.step_inputs import BlockTable, SequenceRows, StepShape, step_inputs
from engine.copies import upload_to
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.products import tile_linears
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch import transformers_hook
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.model.describe import describe
from tests.engine.reference import reference

CPU = torch.device("cpu")
HIDDEN_LAYERS = (0, 2, 1)
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
}
STEPS = [
    [SequenceRows([7, 3, 9, 1, 2, 8], 0, [[3, 1]]), SequenceRows([4, 5], 0, [[2, 5]])],
    [SequenceRows([9], 6, [[3, 1]]), SequenceRows([1, 2, 3], 2, [[2, 5]], [1, 3, 5])],
]


def made(config: Any) -> PreTrainedModel:
    transformers_hook.register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=transformers_hook.NAME
    )
    return model.eval().requires_grad_(False)


def new_pool() -> KVPool:
    group = Group.uniform(TARGET, Segment(2, 1, 16, torch.float32))
    return KVPool(PoolLayout((group,), 16), 8, CPU, None)


def test_products_of_one_input_in_several_ways() -> None:
    model = made(CONFIGS["qwen3"])
    backends = [TritonBackend(new_pool().layers(TARGET)) for _ in range(2)]
    expected = reference(model, backends[0]).run(Step(STEPS[0], [1, 3])).logits
    plain = model.model.layers[1].mlp.gate_proj
    tile_linears(model, torch.float32, plain=True)
    model.model.layers[1].mlp.gate_proj = plain
    decoder = CudaDecoder(describe(model), backends[1], 128)
    ours = CudaRunner(decoder, backends[1], CPU, "", Buckets([1], [1], [1], trees=False))
    torch.testing.assert_close(ours.run(Step(STEPS[0], [1, 3])).logits, expected, atol=1e-5, rtol=1e-5)


def test_padding_rows_write_nothing() -> None:
    model, results = made(CONFIGS["qwen3"]), []
    for least in (StepShape(), StepShape(rows=8, logits=4, sequences=6, rows_each=4, blocks=4)):
        pool = new_pool()
        backend = TritonBackend(pool.layers(TARGET))
        decoder = CudaDecoder(describe(model), backend, 128)
        inputs = step_inputs([STEPS[0][1]], [0, 1], upload_to(CPU), BlockTable(backend.block_size), least)
        backend.begin_step(inputs.attention)
        with torch.inference_mode():
            results.append((decoder.forward(inputs)[0][:2], pool.memory.view(torch.float32)))
    written, beside_padding = results[0][1], results[1][1]
    assert torch.equal(written != 0, beside_padding != 0)
    torch.testing.assert_close(beside_padding, written)
    torch.testing.assert_close(results[0][0], results[1][0])
