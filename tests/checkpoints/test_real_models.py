"""SmolLM2-135M-Instruct as its GGUF file, against what Transformers computes of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints.source import hf_source
from engine.engine import Engine
from protocol.config import ServeConfig
from tests.real_models import SMOLLM2, gguf_file
from tests.speculation.small_engine import ask, run

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "你好，世界",
    "Once upon a time 😀",
    "12 + 30 =",
    "the quick brown fox jumps over the lazy dog " * 30,
]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def path() -> Path:
    return gguf_file(SMOLLM2)


def engine_of(path: Path, dtype: str) -> Engine:
    sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**28}
    return Engine(ServeConfig(model=str(path), dtype=dtype, device="cpu", **sizes))


@pytest.mark.timeout(900)
def test_greedy_tokens_are_transformers(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_source(str(path)))
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    requests = [ask(str(n), ids, NUM_TOKENS, ignore_eos=True) for n, ids in enumerate(prompts)]
    found = run(engine_of(path, "float32"), requests)
    config = AutoConfig.from_pretrained(hf_source(str(path)))
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]  # it is tied
    for number, ids in enumerate(prompts):
        answer = found[str(number)].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer, PROMPTS[number][:40]


def test_a_chat_ends_with_its_turn(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hf_source(str(path)))
    messages = [{"role": "user", "content": "What is 2+2?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = run(engine_of(path, "bfloat16"), [ask("chat", ids, 60)])["chat"]
    assert "is 4." in tokenizer.decode(answer.token_ids)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
