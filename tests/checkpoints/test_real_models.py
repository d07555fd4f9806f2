"""SmolLM2 135M and Gemma 3 270M from GGUF files: compared with Transformers on the same file, quantized, and
served by a split pair.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints.source import hf_source
from deploy.config import speculative_config
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.outputs import TokenOutput, paged_logprobs
from protocol.requests import EngineRequest
from tests.e2e.serving import HttpServing
from tests.real_models import GEMMA3, SMOLLM2, Packaged, gguf_file, smollm2
from tests.speculation.small_engine import ask, run, tokens

TEXT = (Path(__file__).parents[2] / "LLM_SERVING.md").read_text()
RAW = [
    "The capital of France is",
    "12 + 30 =",
    "Roses are red,",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "#include <stdio.h>\n\nint main(",
    "SELECT name, age FROM people WHERE",
    "<html>\n<head>\n<title>",
    "你好，世界",
    "東京は日本の",
    "한국의 수도는",
    "Once upon a time 😀",
    "🎉🎉 Party at",
    "Der schnelle braune Fuchs",
    "   leading   spaces and\ttabs\n\n",
]
ASKED = ["What is 2+2?", "Name three colours.", "Write a haiku about rain.", "Wer war Goethe? 🤔"]
LONG = {SMOLLM2.name: TEXT[:1_000], GEMMA3.name: TEXT[:4_800]}
"""Prompts. Gemma's exceeds 1,500 tokens, three of its windows."""
NUM_TOKENS = 10
MODELS = pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=["smollm2", "gemma3"])
SIZES: dict[str, Any] = {"max_model_len": 2560, "kv_cache_memory_bytes": 2**28, "device": "cpu"}


def engine_of(model: str | Path, **options: Any) -> Engine:
    return Engine(ServeConfig(model=str(model), **(SIZES | options)))


@cache
def tokenizer_of(model: Packaged) -> PreTrainedTokenizer:
    return AutoTokenizer.from_pretrained(hf_source(str(gguf_file(model))))


@cache
def prompts_of(model: Packaged) -> dict[str, list[int]]:
    tokenizer = tokenizer_of(model)
    prompts = [tokenizer(text).input_ids for text in (*RAW, LONG[model.name])]
    for text in ASKED:
        message = {"role": "user", "content": text}
        if tokenizer.chat_template is None:  # Gemma's file is the base model, without a chat template
            prompts.append(tokenizer(f"Q: {text}\nA:").input_ids)
        else:
            chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
            prompts.append(chat["input_ids"])
    return {str(number): ids for number, ids in enumerate(prompts)}


@cache
def reference_of(model: Packaged) -> PreTrainedModel:
    """Load the file's values by Transformers' reader, in float32."""
    path = gguf_file(model)
    config = AutoConfig.from_pretrained(hf_source(str(path)))
    del config.quantization_config
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)
    assert reference.load_state_dict(read["tensors"], strict=False).missing_keys == ["lm_head.weight"]
    return reference  # the head shares the embeddings' weights


def shortfalls(model: Packaged, found: dict[str, TokenOutput]) -> torch.Tensor:
    """Return by how much each token's logit is below the reference's best, float32 [tokens]."""
    below = []
    for name, ids in prompts_of(model).items():
        answer = torch.tensor(found[name].token_ids)
        with torch.no_grad():
            given = torch.tensor([ids + answer.tolist()])
            logits = reference_of(model)(given, logits_to_keep=len(answer) + 1).logits[0, :-1]
        below.append(logits.amax(-1) - logits.gather(-1, answer[:, None])[:, 0])
    return torch.cat(below)


def greedy_requests(model: Packaged) -> list[EngineRequest]:
    return [ask(name, ids, NUM_TOKENS, ignore_eos=True) for name, ids in prompts_of(model).items()]


@MODELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.timeout(900)
def test_greedy_tokens_are_transformers(model: Packaged, dtype: str) -> None:
    """In bfloat16 a token may differ where another one is about as likely."""
    engine = engine_of(gguf_file(model), dtype=dtype)
    below = shortfalls(model, run(engine, greedy_requests(model)))
    same = (below == 0).float().mean()
    print(f"{dtype}: {same:.1%} of the tokens are Transformers', others {below.max():.3f} below")
    if dtype == "float32":
        assert same == 1
    assert same > 0.95
    assert below.max() < 0.25


VARIANTS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "mxfp4": {"quantization": "mxfp4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
}
LOSSES = {"int8": 0.02, "fp8": 0.04, "int4": 0.25, "mxfp4": 0.5, "int8 KV": 0.02, "fp8 KV": 0.03}
"""The largest allowed growth of perplexity by format."""


def perplexity(**options: Any) -> float:
    """Return the perplexity of SmolLM2 on a text, in bfloat16 unless `options` say otherwise."""
    ids = tokenizer_of(SMOLLM2)(TEXT[10_000:14_000]).input_ids
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
    plain = perplexity_in_bfloat16()
    loss = perplexity(**VARIANTS[variant]) / plain - 1
    print(f"perplexity {plain:.1f} in bf16, {variant}: {loss:+.1%}")
    assert plain < 60
    assert -0.02 < loss < LOSSES[variant]


def test_a_chat_ends_after_its_turn() -> None:
    message = {"role": "user", "content": "What is 2+2?"}
    tokenizer = tokenizer_of(SMOLLM2)
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = run(engine_of(gguf_file(SMOLLM2), dtype="bfloat16"), [ask("chat", ids, 60)])["chat"]
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
    ("model", "kv_cache_dtype"),
    [(SMOLLM2, "auto"), (SMOLLM2, "int8"), (GEMMA3, "auto")],
    ids=["smollm2", "smollm2-int8", "gemma3"],
)
@pytest.mark.timeout(900)
def test_a_split_pair_with_drafts_and_a_killed_worker(model: Packaged, kv_cache_dtype: str) -> None:
    """In bfloat16: the tokens are those of one engine that nothing happens to."""
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": "auto", "kv_cache_dtype": kv_cache_dtype}
    prompts = prompts_of(model)
    alone = engine_of(gguf_file(model), **options)
    expected = tokens(run(alone, greedy_requests(model)))
    options["speculative_config"] = speculative_config({"method": "suffix"}, "--speculative-config", "")
    workers = {"prefill-0": "", "decode-0": "KILL:after:after_step:7", "decode-1": ""}
    with HttpServing(gguf_file(model), workers, **(SIZES | options)) as serving:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda ids: served(serving, ids), prompts.values())
            serving.bury("decode-0")
            assert dict(zip(prompts, answers, strict=True)) == expected
        serving.wait_empty()
