"""SmolLM2 135M and Gemma 3 270M from GGUF files, compared with Transformers on the same file, SmolLM2 also
quantized, and both served by a split pair.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.gguf.reader import read_gguf
from deploy.config import speculative_config
from engine.assembly import load_served
from engine.quantization.gguf_blocks import dequantized
from protocol.config import ServeConfig
from protocol.outputs import paged_logprobs
from tests.checkpoints.transformers_answers import (
    NUM_TOKENS,
    SIZES,
    engine_of,
    outputs_of,
    prompts_of,
    shortfalls,
    tokenizer_of,
)
from tests.e2e.serving import HttpServing
from tests.real_models import GEMMA3, SMOLLM2, Packaged, gguf_file, smollm2
from tests.speculation.small_engine import ask

TEXT = (Path(__file__).parents[1] / "quantization" / "held_out.txt").read_text()


@pytest.mark.parametrize(
    ("dtype", "model"),
    [("float32", SMOLLM2), ("bfloat16", SMOLLM2), ("float32", GEMMA3), ("bfloat16", GEMMA3)],
    ids=["float32-smollm2", "bfloat16-smollm2", "float32-gemma3", "bfloat16-gemma3"],
)
def test_greedy_tokens_are_transformers(dtype: str, model: Packaged) -> None:
    """In bfloat16 a token may differ where another one is about as likely."""
    below = shortfalls(model, dtype)
    assert len(below) == len(prompts_of(model)) * NUM_TOKENS
    same = below.count(0) / len(below)
    print(f"{dtype}: {same:.1%} of the tokens are Transformers', others {max(below):.3f} below")
    assert same == 1 if dtype == "float32" else same > 0.95
    assert max(below) < 0.25


def test_the_codes_of_a_tied_head_are_the_only_embeddings() -> None:
    file = gguf_file(SMOLLM2)
    loaded = load_served(ServeConfig(model=str(file), dtype="bfloat16", device="cpu"), None)
    assert loaded.description is not None and not loaded.description.model.embeddings
    assert loaded.description.num_bytes < 1.01 * file.stat().st_size
    table = dequantized(read_gguf(file).tensors["token_embd.weight"], torch.bfloat16)
    module = loaded.model.get_input_embeddings()
    assert torch.equal(module.weight, table) and not list(module.parameters())
    token_ids = torch.tensor([5, 49000])
    assert torch.equal(module(token_ids), table[token_ids])
    assert module.weight is module.weight, "a head that runs the module reads the table once"


VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "int8, int8 KV": ({"quantization": "int8", "kv_cache_dtype": "int8"}, 0.03),
    "fp8, fp8 KV": ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, 0.05),
    "int4": ({"quantization": "int4"}, 0.25),
    "mxfp4": ({"quantization": "mxfp4"}, 0.5),
}
"""Options, and the largest growth of perplexity that they may bring."""


def perplexity(**options: Any) -> float:
    """Return the perplexity of SmolLM2 on a text, in bfloat16 unless `options` say otherwise."""
    ids = tokenizer_of(SMOLLM2)(TEXT[3_000:]).input_ids
    engine = engine_of(smollm2(), dtype="bfloat16", **options)
    engine.add(ask("text", ids, 1, prompt_logprobs=0))
    pages: list[bytes] = []
    while engine.has_work():
        pages += [page for output in engine.step().outputs for page in output.prompt_logprobs or []]
    _, *found = paged_logprobs(pages)
    return math.exp(-sum(each.logprob for each in found if each) / len(found))


@cache
def perplexity_in_bfloat16() -> float:
    return perplexity()


@pytest.mark.parametrize("variant", VARIANTS)
def test_perplexity_of_quantized_weights_and_kv(variant: str) -> None:
    options, most = VARIANTS[variant]
    plain = perplexity_in_bfloat16()
    loss = perplexity(**options) / plain - 1
    print(f"perplexity {plain:.1f} in bf16, {variant}: {loss:+.1%}")
    assert plain < 60
    assert -0.02 < loss < most


def test_a_chat_ends_after_its_turn() -> None:
    answer, tokenizer = outputs_of(SMOLLM2, "bfloat16")["chat"], tokenizer_of(SMOLLM2)
    assert "is 4." in tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def served(serving: HttpServing, ids: list[int]) -> list[int]:
    body = {"prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = serving.http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"), [(SMOLLM2, "int8"), (GEMMA3, "auto")], ids=["smollm2-int8", "gemma3"]
)
def test_a_split_pair_with_drafts_and_a_killed_worker(model: Packaged, kv_cache_dtype: str) -> None:
    """In bfloat16: the tokens are those of one engine that nothing happens to."""
    prompts = dict([*prompts_of(model).items()][-6:])
    alone = outputs_of(model, "bfloat16", kv_cache_dtype, tuple(prompts))
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": "auto", "kv_cache_dtype": kv_cache_dtype}
    options["speculative_config"] = speculative_config({"method": "suffix"}, "--speculative-config", "")
    workers = {"prefill-0": "", "decode-0": "KILL:after:after_step:7", "decode-1": ""}
    with HttpServing(gguf_file(model), workers, **(SIZES | options)) as serving:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda ids: served(serving, ids), prompts.values())
            serving.bury("decode-0")
            assert list(answers) == [alone[name].token_ids for name in prompts]
        serving.wait_empty()
