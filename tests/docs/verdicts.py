"""Serves a small random model of a type and compares its tokens with those of `generate`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from engine.engine import Engine
from engine.kv.layout import TARGET
from engine.model.families import FAMILIES
from engine.model.text_half import as_causal, make_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from tests.docs.tiny_shapes import tiny_config
from tests.engine.test_engine import ask, run, tokens
from tests.worker.tiny_model import greedy

LENGTHS, NUM_TOKENS, CHUNK = (5, 45), 12, 16
"""Prompt lengths, generated tokens and chunk size. The longer prompt exceeds the small windows and is
computed in chunks beside the other.
"""

MOST_PARAMETERS = 100_000_000


@dataclass(frozen=True)
class Verdict:
    """The outcome for a model type. `reason` is empty for "served"; "untried" means that Transformers cannot
    build or run it.
    """

    kind: Literal["served", "refused", "different", "untried"]
    reason: str = ""
    served_class: str = ""
    is_native: bool = False
    """Whether the native decoder runs it in bfloat16."""
    is_recurrent: bool = False
    is_deterministic: bool = False
    """Whether tokens in bfloat16 are the same in every batch."""
    keeps_latents: bool = False


def verdict(model_type: str) -> Verdict:
    prompts = [[4 + (7 * i * i + 3 * i + 5 * length) % 300 for i in range(length)] for length in LENGTHS]
    try:
        model = _build(model_type)
        expected = [_greedy(model, prompt) for prompt in prompts]
    except Exception as error:  # Transformers may raise anything
        return Verdict("untried", " ".join(f"{type(error).__name__}: {error}".split())[:200])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = ServeConfig(
            model=folder,
            dtype="float32",
            device="cpu",
            compile="off",
            max_model_len=128,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            kv_cache_memory_bytes=2**24,
        )
        try:
            engine = Engine(config)
            served_class = _served_class(model)
            compile: Literal["auto", "off"] = "auto" if served_class in FAMILIES else "off"
            start_up = Engine(replace(config, dtype="bfloat16", compile=compile)).start_up
        except (UnsupportedModelError, ConfigError) as error:
            return Verdict("refused", str(error).splitlines()[0].replace(folder, "FOLDER"))
    for i, prompt in enumerate(prompts):
        engine.add(ask(str(i), prompt, NUM_TOKENS))
    outputs = run(engine)
    found = [tokens(outputs[str(i)]) for i in range(len(prompts))]
    if found != expected:
        return Verdict("different", f"{found} instead of {expected}")
    layers = engine.pool.layers(TARGET)
    return Verdict(
        "served",
        served_class=served_class,
        is_native=start_up["forward"].startswith("native"),
        is_recurrent=engine.pool.state_slots is not None,
        is_deterministic=start_up["deterministic"] == "yes",
        keeps_latents=all(layer.values_in_keys for layer in layers),
    )


def _served_class(model: PreTrainedModel) -> str:
    with torch.device("meta"):
        return type(as_causal(make_model(model.config))).__name__


def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    try:
        return greedy(model, prompt, NUM_TOKENS)
    except AttributeError:  # Transformers does not run a whole Llama 4 on text alone
        return greedy(as_causal(model), prompt, NUM_TOKENS)


@torch.no_grad()
def _build(model_type: str) -> PreTrainedModel:
    """Build the model as Transformers publishes it, with all its parts and weights large enough that its
    tokens vary.
    """
    config = tiny_config(model_type)
    is_composite = type(config) in AutoModelForMultimodalLM._model_mapping
    kind = AutoModelForMultimodalLM if is_composite else AutoModelForCausalLM
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters in what is to be a small model")
    torch.manual_seed(3)
    model = kind.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1 and weight.std() < 0.1:
            torch.nn.init.normal_(weight, std=0.2)
    return model
