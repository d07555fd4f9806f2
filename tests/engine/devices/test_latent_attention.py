"""Models with latent attention store latents: their size, tokens and bits, and when they are expanded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import select_backend
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.torch.latent_attention import Absorbed, PackedHeadProducts, expansion_reason
from engine.engine import Engine
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.load.loader import load_model
from engine.load.select import build_runner
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from tests.docs.tiny_shapes import tiny_config
from tests.engine import program_models
from tests.engine.kernels import CPU, needs_kernel
from tests.engine.test_engine import ask, prompt_of, run, tiny_engine, tokens
from tests.worker.tiny_model import greedy, load

TOKEN_VALUES = 16 + 8
"""Values per token and layer. Expanded, they would be four heads' keys of 24 and values of 16."""


def write(folder: Path, model_type: str = "deepseek_v2") -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


def make_engine(folder: Path, **options: Any) -> Engine:
    return tiny_engine(folder, **{"kv_cache_memory_bytes": 2**21, "max_model_len": 256} | options)


def parts_of(model: torch.nn.Module) -> list[Absorbed]:
    return [module for module in model.modules() if isinstance(module, Absorbed)]


def logits_of(folder: Path, batches: list[list[SequenceRows]], **options: Any) -> list[Tensor]:
    """Return the logits of every row, in bfloat16 and by packed modules unless `options` say otherwise."""
    options = {"model": str(folder), "dtype": "bfloat16", "device": "cpu", "compile": "off"} | options
    config = ServeConfig(**options)
    loaded = load_model(config)
    pool = KVPool(PoolLayout((loaded.kv_group,), 16), 16, CPU, None)
    backend = select_backend(CPU, loaded.dtype)[0](pool.layers(TARGET))
    runner = build_runner(loaded, backend, config.compile)
    if config.compile == "auto":
        assert isinstance(runner, NativeDecoder)
    elif loaded.dtype is torch.bfloat16:
        assert all(isinstance(parts.to_value, PackedHeadProducts) for parts in parts_of(loaded.model))
    return [
        runner.run(Step(batch, range(sum(len(rows.token_ids) for rows in batch)))).logits for batch in batches
    ]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_tokens_equal_generate(folder: Path, backend: str) -> None:
    engine = make_engine(folder, attention_backend=backend)
    assert engine.pool.token_bytes == 4 * TOKEN_VALUES * 4  # layers, values, bytes
    assert "latents" not in engine.start_up["kv_pool"]
    reference = load(folder)
    prompts = [prompt_of(length, length) for length in (1, 40, 150)]
    expected = [greedy(reference, prompt, 10) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 10, "a test that cannot fail"
    for i, prompt in enumerate(prompts):
        engine.add(ask(f"{i}", prompt, 10))
    outputs = run(engine)
    assert [tokens(outputs[f"{i}"]) for i in range(3)] == expected
    engine.add(ask("again", prompts[2], 10))
    again = run(engine)["again"]
    assert again[0].cached_tokens == 144
    assert tokens(again) == expected[2]


def test_adapters_of_the_projections_expand_latents(folder: Path) -> None:
    engine = make_engine(folder, enable_lora=True)
    assert engine.pool.token_bytes == 4 * (4 * 24 + 4 * 16) * 4
    told = "160 values a token and layer instead of latents of 24: adapters may change what they are made by"
    assert engine.start_up["kv_pool"].endswith(told)


def test_latents_are_stored_as_latents(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: int8: latents, of which .* use auto"):
        make_engine(folder, kv_cache_dtype="int8")


def test_reasons_for_expanding_latents() -> None:
    older = SimpleNamespace(kv_b_proj=None)
    model: Any = SimpleNamespace(modules=lambda: [older])
    served, gpu = ServeConfig(model="m"), torch.device("cuda")
    assert "no other form" in expansion_reason(model, served, gpu)
    assert "--deterministic" in expansion_reason(model, replace(served, deterministic=True), gpu)
    model.modules = list
    assert not expansion_reason(model, replace(served, deterministic=True), gpu)


@needs_kernel
def test_a_row_is_the_same_alone_and_in_a_batch(folder: Path) -> None:
    texts = [prompt_of(length, length) for length in (5, 33, 20)]
    crowd = [SequenceRows(text, 0, [[4 * i, 4 * i + 1, 4 * i + 2]]) for i, text in enumerate(texts)]
    together, *alone = logits_of(folder, [crowd, *([rows] for rows in crowd)])
    assert torch.equal(together, torch.cat(alone))
    rows = [[SequenceRows([token], i, [[0]])] for i, token in enumerate(texts[0])]
    assert torch.equal(torch.cat(logits_of(folder, rows)), together[:5])


@needs_kernel
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in program_models.LATENT), ("deepseek_v3-whole_queries", "float32")],
)
def test_the_native_decoder_computes_what_the_modules_do(name: str, dtype: str, tmp_path: Path) -> None:
    """Rounding changes few rows' experts."""
    program_models.write(name, tmp_path)
    text = [(7 * place) % 290 + 3 for place in range(60)]
    batches = [[SequenceRows(text[:40], 0, [[0, 1, 2, 3]])], [SequenceRows(text[40:], 40, [[0, 1, 2, 3]])]]
    alone = [[SequenceRows([token], place, [[0, 1, 2, 3]])] for place, token in enumerate(text)]
    options = {"dtype": dtype, "max_model_len": 64}
    modules, natively, by_rows = (
        torch.cat(logits_of(tmp_path, steps, compile=compile, **options))
        for steps, compile in ((batches, "off"), (batches, "auto"), (alone, "auto"))
    )
    assert torch.equal(natively, by_rows)
    far = (natively - modules).float().norm(dim=-1) / modules.float().norm(dim=-1)
    assert far.median() < (1e-5 if dtype == "float32" else 0.03)


@needs_kernel
def test_quantized_weights_are_absorbed_too(folder: Path) -> None:
    """Quantization changes some rows' experts."""
    batch = [SequenceRows(prompt_of(30), 0, [[0, 1]])]
    absorbed, expanded = (
        logits_of(folder, [batch], quantization="int8", enable_lora=lora)[0].float() for lora in (False, True)
    )
    assert 0 < (absorbed - expanded).norm() < 0.2 * expanded.norm()
