"""How well the bundled model still predicts held-out code with its weights in a format."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from bench.quantize.speed import PLAIN
from engine.loader import load_model
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.config import ServeConfig


@dataclass(frozen=True)
class Quality:
    """Held-out bits per byte; and against the plain weights, the Kullback-Leibler divergence of the next
    token's distribution in nats, and the share of places with the same likeliest token.
    """

    bits_per_byte: float
    divergence: float
    agreement: float


@dataclass(frozen=True)
class Text:
    """Token ids, each text's int64 [1, length]; and the bytes that are predicted."""

    token_ids: Sequence[Tensor]
    num_bytes: int


def held_out(texts: int) -> Text:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    lines = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()[:texts]
    encoded = [tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids for line in lines]
    num_bytes = sum(len(tokenizer.decode(ids[0, 1:]).encode()) for ids in encoded)
    return Text(encoded, num_bytes)


@torch.inference_mode()
def measure(formats: Sequence[str], text: Text) -> dict[str, Quality]:
    """By format, in bfloat16."""
    plain = _log_probabilities(PLAIN, text)
    qualities = {}
    for format in formats:
        found = plain if format == PLAIN else _log_probabilities(format, text)
        qualities[format] = _quality(found, plain, text)
    return qualities


def _log_probabilities(format: str, text: Text) -> list[Tensor]:
    """Of each text's tokens but the first, float32 [length - 1, vocabulary]."""
    config = ServeConfig(model=str(BUNDLED_MODEL), device="cpu", dtype="bfloat16")
    if format != PLAIN:
        config = msgspec.structs.replace(config, quantization=format)
    model: PreTrainedModel = load_model(config).model
    model.set_attn_implementation("sdpa")
    every = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in text.token_ids)
    return [logits.float().log_softmax(-1) for logits in every]


def _quality(found: Sequence[Tensor], plain: Sequence[Tensor], text: Text) -> Quality:
    nats, divergence, agreeing, places = 0.0, 0.0, 0, 0
    for ours, reference, ids in zip(found, plain, text.token_ids, strict=True):
        nats -= float(ours.gather(1, ids[0, 1:, None]).sum())
        divergence += float((reference.exp() * (reference - ours)).sum())
        agreeing += int((ours.argmax(1) == reference.argmax(1)).sum())
        places += len(ours)
    return Quality(nats / math.log(2) / text.num_bytes, divergence / places, agreeing / places)
