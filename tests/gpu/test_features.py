"""Engines on the GPU with rarer features: recurrent layers, adapters, quantized KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.load import loader
from engine.load.loader import load_model
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import write_model
from tests.engine.adapter_files import merge, write_adapter
from tests.gpu.test_tokens import LENGTHS, NUM_TOKENS, drafts_too, engine_of, generate, prompts
from tests.worker.tiny_model import greedy, load


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "falcon_h1"])
@drafts_too
def test_hybrids_give_the_tokens_of_generate(
    model_type: str, drafts: SpeculativeConfig | None, tmp_path: Path
) -> None:
    """One model has linear attention, the other Mamba2 beside attention in each layer."""
    write_model(model_type, tmp_path)
    reference, batch = load(tmp_path), prompts(LENGTHS)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    assert generate(engine_of(tmp_path, speculative_config=drafts), batch) == expected


@drafts_too
def test_adapters_give_the_tokens_of_merged_weights(drafts: SpeculativeConfig | None, tmp_path: Path) -> None:
    """Requests with two adapters and without any run in the same steps."""
    write_model("qwen3", tmp_path)
    paths = [write_adapter(tmp_path, tmp_path / f"adapter-{seed}", seed) for seed in range(2)]
    models = [load(tmp_path), *(merge(load(tmp_path), path, lambda _: 2.0) for path in paths)]
    engine = engine_of(
        tmp_path, lora_modules={path.name: str(path) for path in paths}, speculative_config=drafts
    )
    batch = prompts(LENGTHS)
    expected = [greedy(models[index % 3], prompt, NUM_TOKENS) for index, prompt in enumerate(batch)]
    assert adapted(engine, batch) == expected


@drafts_too
def test_requests_without_adapters_get_the_tokens_of_a_server_without(
    drafts: SpeculativeConfig | None, tmp_path: Path
) -> None:
    """CUDA graphs run before and after requests with adapters, beside a pool that leaves room for both."""
    write_model("qwen3", tmp_path)
    path = write_adapter(tmp_path, tmp_path / "adapter", 0)
    options: dict[str, Any] = {
        "speculative_config": drafts,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
    }
    batch = prompts(LENGTHS)
    expected = generate(engine_of(tmp_path, **options), batch)
    engine = engine_of(tmp_path, lora_modules={"adapter": str(path)}, **options)
    forward = engine.start_up["forward"]
    assert forward.startswith("CUDA decoder") and forward.endswith("graphs")
    assert generate(engine, batch) == expected
    merged = merge(load(tmp_path), path, lambda _: 2.0)
    assert adapted(engine, batch[:2]) == [expected[0], greedy(merged, batch[1], NUM_TOKENS)]
    assert generate(engine, batch) == expected


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_kv_gives_most_first_tokens_of_a_cpu(kv_cache_dtype: str, tmp_path: Path) -> None:
    """In float32 the last bit of the GPU's value may select another code, and so another token at a
    near tie.
    """
    write_model("qwen3", tmp_path)
    batch = prompts(LENGTHS)
    ours, cpu = (
        generate(engine_of(tmp_path, kv_cache_dtype=kv_cache_dtype, device=device), batch, max_tokens=1)
        for device in ("cuda", "cpu")
    )
    assert sum(one == other for one, other in zip(ours, cpu, strict=True)) >= len(batch) - 1


def test_weights_loaded_straight_to_the_device_equal_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="Transformers needs it for a device map")
    write_model("qwen3", tmp_path)
    config = engine_of(tmp_path).config
    straight = load_model(config)
    monkeypatch.setattr(loader, "is_accelerate_available", lambda: False)
    by_the_host = load_model(config)
    assert straight.weights == by_the_host.weights
    for one, other in zip(straight.model.parameters(), by_the_host.model.parameters(), strict=True):
        assert one.is_cuda and torch.equal(one, other)


def adapted(engine: Engine, batch: list[list[int]]) -> list[list[int]]:
    """Return greedy tokens without an adapter and with each of the engine's in turn."""
    assert engine.adapters is not None
    adapters = [None, *sorted(engine.adapters.listed(), key=lambda adapter: adapter.name)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(batch):
        adapter = adapters[index % len(adapters)]
        engine.add(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, adapter=adapter)
        )
    tokens: list[list[int]] = [[] for _ in batch]
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
    return tokens
