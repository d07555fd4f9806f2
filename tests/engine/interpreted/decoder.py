"""The CUDA decoder with kernels in Triton's interpreter, compared with Transformers' modules over the same
attention.

`test_interpreted_kernels.py` runs this module in another process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.batch.runner import Step
from engine.batch.step_inputs import BlockTable, SequenceRows, StepShape, step_inputs
from engine.copies import upload_to
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder, unfit
from engine.devices.cuda.products import tile_linears
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch import transformers_hook
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.load.rounding import round_linears
from engine.model.describe import describe
from engine.quantization.weight import CodeFormat
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
    "mistral": MistralConfig(**SHAPE, sliding_window=4),
    "qwen2": Qwen2Config(**SHAPE | {"head_dim": 12}),
    "qwen3": Qwen3Config(**SHAPE),
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5, logits_scaling=4.0, embedding_multiplier=3.0),
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


def pool_of(head_dim: int, quantization: str) -> KVPool:
    group = Group.uniform(TARGET, Segment(2, 1, head_dim, torch.float32))
    if quantization != "none":
        group = group.stored_as(quantization)
    return KVPool(PoolLayout((group,), 16), 8, CPU, None)


CASES = [*((name, "none") for name in CONFIGS), ("qwen3", "int8_row_scales")]


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_it_equals_transformers(name: str, quantization: str) -> None:
    model = made(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases
            parameter.data += 0.1 * torch.randn_like(parameter)
    outputs: list[list[Any]] = []
    pools = [pool_of(model.model.layers[0].self_attn.head_dim, quantization) for _ in range(2)]
    backends = [TritonBackend(p.layers(TARGET), rows=p.groups[TARGET].rows) for p in pools]
    modules = TorchRunner(Modules(model, backends[0], HIDDEN_LAYERS), backends[0], CPU, "off", products="")
    outputs.append([modules.run(Step(step, [1, 3])) for step in STEPS])
    decoder = CudaDecoder(describe(model), backends[1], 128, HIDDEN_LAYERS)
    ours = CudaRunner(decoder, backends[1], CPU, "", Buckets([1, 2, 4], [1, 3], [1, 2], trees=True))
    outputs.append([ours.run(Step(step, [1, 3])) for step in STEPS])
    tolerance = 1e-5 if quantization == "none" else 2e-2  # a last bit may round to another code
    for expected, found in zip(*outputs, strict=True):
        for theirs, mine in zip(expected, found, strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(mine / scale, theirs / scale, atol=tolerance, rtol=0)
    again = modules.run(Step(STEPS[1], [1, 3]))
    torch.testing.assert_close(again.logits, outputs[0][1].logits)


@pytest.mark.parametrize("format", [None, CodeFormat.INT4], ids=str)
def test_products_in_tiles(format: CodeFormat | None) -> None:
    model = made(Qwen3Config(**SHAPE | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}))
    if format is not None:
        round_linears(model, format)
    backends = [TritonBackend(pool_of(32, "none").layers(TARGET)) for _ in range(2)]
    modules = TorchRunner(Modules(model, backends[0]), backends[0], CPU, "off", products="")
    expected = [modules.run(Step(step, [1, 3])).logits for step in STEPS]
    tile_linears(model, torch.float32, plain=format is None)
    assert unfit(describe(model)) is None
    decoder = CudaDecoder(describe(model), backends[1], 128)
    ours = CudaRunner(decoder, backends[1], CPU, "", Buckets([1, 2, 4], [1, 3], [1, 2], trees=True))
    for step, logits in zip(STEPS, expected, strict=True):
        torch.testing.assert_close(ours.run(Step(step, [1, 3])).logits, logits, atol=1e-5, rtol=1e-5)


def test_products_of_one_input_in_several_ways() -> None:
    model = made(CONFIGS["qwen3"])
    backends = [TritonBackend(pool_of(16, "none").layers(TARGET)) for _ in range(2)]
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
        pool = pool_of(16, "none")
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
