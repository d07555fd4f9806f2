"""The quality of a model's predictions of held-out code, with weights and KV in a format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoTokenizer

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.engine import Engine
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL

_CHUNK = 256
"""Tokens of a text per forward, like a prefill chunk."""


@dataclass(frozen=True)
class Quality:
    """Bits per byte of held-out code. Against the plain model: the Kullback-Leibler divergence of the next
    token's distribution in nats, and the share of positions with the same most likely token.
    """

    bits_per_byte: float
    divergence: float
    agreement: float


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of each text, and the number of predicted bytes: all bytes except the first tokens'."""

    token_ids: Sequence[list[int]]
    num_bytes: int


def held_out(texts: int) -> TokenizedTexts:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    lines = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()[:texts]
    encoded: list[list[int]] = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    return TokenizedTexts(encoded, sum(len(tokenizer.decode(ids[1:]).encode()) for ids in encoded))


def measure(engines: Mapping[str, Engine], plain: str, text: TokenizedTexts) -> dict[str, Quality]:
    """Return the quality by engine name, compared with the engine `plain`. The engines must have no
    requests.
    """
    reference = [_log_probabilities(engines[plain], ids) for ids in text.token_ids]
    return {name: _quality(engine, reference, text) for name, engine in engines.items()}


@torch.inference_mode()
def _log_probabilities(engine: Engine, token_ids: list[int]) -> Tensor:
    """Return the log probabilities of a text's tokens except the first, float32 [length - 1, vocabulary]. KV
    is read from the pool, in the pool's format.
    """
    blocks = list(range(-(-len(token_ids) // engine.pool.block_size)))
    parts = []
    for start in range(0, len(token_ids), _CHUNK):
        rows = SequenceRows(token_ids[start : start + _CHUNK], start, [blocks])
        parts.append(engine._runner.run(Step([rows], range(len(rows.token_ids)), wants_hidden=False)).logits)
    logits = torch.cat(parts)[:-1, : engine.vocab_size]
    return logits.float().log_softmax(-1)


def _quality(engine: Engine, reference: Sequence[Tensor], text: TokenizedTexts) -> Quality:
    nats, divergence, agreeing, places = 0.0, 0.0, 0, 0
    for plain, ids in zip(reference, text.token_ids, strict=True):
        ours = _log_probabilities(engine, ids)
        nats -= float(ours.gather(1, torch.tensor(ids)[1:, None]).sum())
        divergence += float((plain.exp() * (plain - ours)).sum())
        agreeing += int((ours.argmax(1) == plain.argmax(1)).sum())
        places += len(ours)
    return Quality(nats / math.log(2) / text.num_bytes, divergence / places, agreeing / places)
