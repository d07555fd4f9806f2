"""Greedy answers of engines and of Transformers to prompts for real models, both from the same file.

`python -m tests.checkpoints.transformers_answers` records those of Transformers, in float32, in
`transformers_answers.json`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints.source import hf_source
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.outputs import TokenOutput
from tests.real_models import GEMMA3, SMOLLM2, Packaged, gguf_file
from tests.speculation.small_engine import ask, run

RECORD = Path(__file__).with_suffix(".json")
NUM_TOKENS = 10
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
LONG = {SMOLLM2.name: 1_000, GEMMA3.name: 5_600}
"""Characters of LICENSE that are the long prompts. Gemma's exceeds two of its windows of 512 tokens."""
SIZES: dict[str, Any] = {"max_model_len": 2560, "kv_cache_memory_bytes": 2**28, "device": "cpu"}


@cache
def tokenizer_of(model: Packaged) -> PreTrainedTokenizer:
    return AutoTokenizer.from_pretrained(hf_source(str(gguf_file(model))))


@cache
def prompts_of(model: Packaged) -> dict[str, list[int]]:
    tokenizer = tokenizer_of(model)
    long = (Path(__file__).parents[2] / "LICENSE").read_text()[: LONG[model.name]]
    prompts = [tokenizer(text).input_ids for text in (*RAW, long)]
    for text in ASKED:
        message = {"role": "user", "content": text}
        if tokenizer.chat_template is None:  # Gemma's file is the base model, without a chat template
            prompts.append(tokenizer(f"Q: {text}\nA:").input_ids)
        else:
            chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
            prompts.append(chat["input_ids"])
    return {str(number): ids for number, ids in enumerate(prompts)}


def engine_of(model: str | Path, **options: Any) -> Engine:
    return Engine(ServeConfig(model=str(model), **(SIZES | options)))


@cache
def outputs_of(model: Packaged, dtype: str) -> dict[str, TokenOutput]:
    """Return what one engine answers to all prompts. SmolLM2 also answers to a chat, which it may end."""
    engine, prompts = engine_of(gguf_file(model), dtype=dtype), prompts_of(model)
    asked = [ask(name, ids, NUM_TOKENS, ignore_eos=True) for name, ids in prompts.items()]
    return run(engine, [*asked, ask("chat", prompts["16"], 60)] if model is SMOLLM2 else asked)


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


def recorded(model: Packaged) -> list[list[int]]:
    """Return Transformers' answers to the model's prompts."""
    answers: list[list[int]] = json.loads(RECORD.read_text())[model.name]
    return answers


def greedy(model: Packaged, ids: list[int]) -> list[int]:
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    answer: list[int] = reference_of(model).generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    return answer


def main() -> None:
    found = {}
    for model in (GEMMA3, SMOLLM2):
        found[model.name] = [greedy(model, ids) for ids in prompts_of(model).values()]
    RECORD.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
