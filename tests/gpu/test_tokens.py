"""An engine on the GPU in float32 gives the tokens of Transformers' `generate` in any batch."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.step.draft import Verdict
from engine.step.launch import Launched
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, write_model
from tests.engine.quantization.quantized_model import EXPERTS, write_quantized
from tests.worker.tiny_model import greedy, load

DEVICE: Any = "cuda"
CHUNK = 64
LENGTHS = [1, 7, 16, 31, 48, CHUNK, 100, 3 * CHUNK]
NUM_TOKENS = 20
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
EAGER: dict[str, Any] = {"enforce_eager": True}
MODULES: dict[str, Any] = {"compile": "off"}
drafts_too = pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["decode rows", "drafts to verify"])
sampled_too = pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])


def engine_of(folder: Path, **changes: Any) -> Engine:
    config = ServeConfig(
        model=str(folder),
        dtype="float32",
        device=DEVICE,
        max_model_len=256,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=16,
        kv_cache_memory_bytes=8 << 20,
    )
    return Engine(replace(config, **changes), speculate=BatchSpeculator)


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def generate(engine: Engine, batch: list[list[int]], **sampling: Any) -> list[list[int]]:
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True} | sampling
    for index, prompt in enumerate(batch):
        request = SamplingParams(**params | {"seed": len(prompt)})
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=request))
    tokens: list[list[int]] = [[] for _ in batch]
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[int(output.request_id)] += output.token_ids
    return tokens


def steps_ahead_of(engine: Engine) -> list[bool]:
    """Record for each later step whether the next one was launched before its tokens were known."""
    launched, verdicts = [], engine._launcher.verdicts

    def note(step: Launched) -> list[Verdict]:
        launched.append(engine._launcher.is_ahead)
        return verdicts(step)

    engine._launcher.verdicts = note
    return launched


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_equal_generate(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    reference, batch = load(tmp_path), prompts(LENGTHS)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    assert generate(engine_of(tmp_path), batch) == expected


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"deterministic": True}], ids=str)
def test_products_in_tiles_give_the_tokens_of_a_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    batch = prompts(LENGTHS)
    ours, cpu = engine_of(tmp_path, **options), engine_of(tmp_path, device="cpu", **options)
    assert "in tiles" in ours.start_up["products"]
    assert generate(ours, batch) == generate(cpu, batch)


@pytest.mark.parametrize(
    ("model_type", "layout", "shape"),
    [("qwen3", "gptq", {}), ("qwen3", "fp8_blocks", {}), ("qwen3_moe", "awq", EXPERTS)],
)
def test_quantized_checkpoints_give_the_tokens_of_a_cpu(
    model_type: str, layout: str, shape: dict[str, int], tmp_path: Path
) -> None:
    """The weights go to the device layer by layer."""
    write_quantized(tmp_path, model_type, layout, vocab_size=VOCAB_SIZE, **shape)
    batch = prompts(LENGTHS)
    ours, cpu = engine_of(tmp_path), engine_of(tmp_path, device="cpu")
    assert generate(ours, batch) == generate(cpu, batch)


WAYS: list[tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = [
    *(
        (name, {}, {"^CUDA decoder": {}, "^eager": MODULES})
        for name in ("llama", "mistral", "qwen2", "qwen3")
    ),
    *((name, {"dtype": "bfloat16"}, {" graphs$": {}, ", eager$": EAGER}) for name in ("qwen3", "gemma2")),
    *((name, {}, {" graphs$": {}, "triton operators, eager$": EAGER, "^eager": MODULES}) for name in HYBRIDS),
]
"""A model, options, and each way to run it by what the engine says of its forward: our decoder or the model's
own modules, graphs or the same padded shapes without them, or each step's own.
"""


@drafts_too
@pytest.mark.parametrize(("model_type", "options", "ways"), WAYS)
def test_every_way_to_run_gives_the_same_tokens(
    model_type: str,
    options: dict[str, Any],
    ways: dict[str, dict[str, Any]],
    drafts: SpeculativeConfig | None,
    tmp_path: Path,
) -> None:
    write_model(model_type, tmp_path)
    batch, tokens = prompts(LENGTHS), []
    for told, way in ways.items():
        engine = engine_of(tmp_path, speculative_config=drafts, **options, **way)
        assert re.search(told, engine.start_up["forward"])
        tokens.append(generate(engine, batch))
    assert all(each == tokens[0] for each in tokens)


@sampled_too
def test_drafted_chains_change_no_token(sampling: dict[str, Any], tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    batch = prompts(LENGTHS)
    drafts = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=4)
    plain, drafted = engine_of(tmp_path), engine_of(tmp_path, speculative_config=drafts)
    assert generate(drafted, batch, **sampling) == generate(plain, batch, **sampling)


@sampled_too
def test_steps_ahead_change_no_token(sampling: dict[str, Any], tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    ahead, apart = engine_of(tmp_path), engine_of(tmp_path)
    apart._launcher._runs_ahead = False
    launched_ahead, launched_apart = steps_ahead_of(ahead), steps_ahead_of(apart)
    sampling = sampling | {"stop_token_ids": list(range(0, VOCAB_SIZE, 10))}
    batch = prompts(LENGTHS)
    assert generate(ahead, batch, **sampling) == generate(apart, batch, **sampling)
    assert sum(launched_ahead) > NUM_TOKENS // 2
    assert not any(launched_apart)


CODED: dict[str, Any] = {"deterministic": True, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "options", [{}, *(CODED | {"kv_cache_dtype": each} for each in ("int8", "fp8"))], ids=str
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_one_seed_gives_one_answer(sampling: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Alone, in a batch, in chunks of more rows than a tile has, and with drafts."""
    write_model("qwen3", tmp_path)
    batch = prompts(LENGTHS)
    crowd = generate(engine_of(tmp_path, **options), batch, **sampling)
    engine = engine_of(tmp_path, **options)
    assert [generate(engine, [prompt], **sampling)[0] for prompt in batch] == crowd
    for changes in ({"max_num_batched_tokens": 4 * CHUNK}, {"speculative_config": DRAFTS}):
        assert generate(engine_of(tmp_path, **options, **changes), batch, **sampling) == crowd


def test_the_pool_leaves_room_for_steps(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    engine = engine_of(
        tmp_path, kv_cache_memory_bytes=None, max_num_batched_tokens=2048, gpu_memory_utilization=0.3
    )
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.2 * total < engine.pool.num_bytes < 0.3 * total
    assert [len(tokens) for tokens in generate(engine, prompts(LENGTHS))] == [NUM_TOKENS] * len(LENGTHS)


def test_a_forward_never_waits_for_the_gpu(tmp_path: Path) -> None:
    """CUDA itself reports synchronizations."""
    from bench.gpu.model import DecoderShape, MadeUpModel

    device = torch.device(DEVICE)
    with torch.inference_mode():
        model = MadeUpModel(DecoderShape(2, 64, 96, 4, 2, 16, 320), device, tmp_path, 128)
        forwards = model.forwards(4 * 128)
        batch = forwards.batch([100] * 4, 3)
        for _ in range(2):
            forwards.run(batch, 3)
            torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            forwards.run(batch, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
