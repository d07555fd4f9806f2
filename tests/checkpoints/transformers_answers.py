"""Greedy answers of engines to prompts for real models, judged by Transformers on the same file.

`python -m tests.checkpoints.transformers_answers` records judgements in `transformers_answers.json`. An
answer that is not recorded, such as one that another CPU gives in bfloat16, is judged when a test asks.
"""

from __future__ import annotations

import hashlib
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
def outputs_of(
    model: Packaged, dtype: str, kv_cache_dtype: str = "auto", names: tuple[str, ...] = ()
) -> dict[str, TokenOutput]:
    """Return what one engine answers to the prompts of these names, or to all. SmolLM2 then also answers to
    a chat, which it may end.
    """
    engine = engine_of(gguf_file(model), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    prompts = prompts_of(model)
    asked = [ask(name, prompts[name], NUM_TOKENS, ignore_eos=True) for name in names or prompts]
    return run(engine, [*asked, ask("chat", prompts["16"], 60)] if model is SMOLLM2 and not names else asked)


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


@torch.no_grad()
def judged(model: Packaged, ids: list[int], answer: list[int]) -> list[float]:
    """Return by how much each token's logit is below the reference's best."""
    given = torch.tensor([ids + answer])
    logits = reference_of(model)(given, logits_to_keep=len(answer) + 1).logits[0, :-1]
    below: list[float] = (logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]).tolist()
    return below


@cache
def recorded() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = json.loads(RECORD.read_text())
    return found


def key_of(ids: list[int], answer: list[int]) -> str:
    return f"{hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]} {answer}"


def shortfalls(model: Packaged, dtype: str) -> list[float]:
    """Return by how much each token of an engine's answers is below the reference's best."""
    known, below = recorded().get(model.name, {}), []
    for name, ids in prompts_of(model).items():
        answer = outputs_of(model, dtype)[name].token_ids
        below += known.get(key_of(ids, answer)) or judged(model, ids, answer)
    return below


def main() -> None:
    record: dict[str, dict[str, list[float]]] = {model.name: {} for model in (GEMMA3, SMOLLM2)}
    for model in (GEMMA3, SMOLLM2):
        for dtype in ("float32", "bfloat16"):
            outputs = outputs_of(model, dtype)
            for name, ids in prompts_of(model).items():
                answer = outputs[name].token_ids
                below = [round(each, 4) for each in judged(model, ids, answer)]
                record[model.name][key_of(ids, answer)] = below
    models = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(key)}: {below}" for key, below in known.items())
        + "\n}"
        for name, known in record.items()
    )
    RECORD.write_text("{\n" + ",\n".join(models) + "\n}\n")


if __name__ == "__main__":
    main()
