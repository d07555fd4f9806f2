"""Measures how well a model predicts a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    """Windows of tokens, int64 [n, length], and the bytes of their text without each window's first token."""

    windows: Tensor
    num_bytes: int

    @classmethod
    def of(cls, windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> HeldOut:
        texts = tokenizer.batch_decode(windows[:, 1:].tolist())
        return cls(windows, sum(len(text.encode()) for text in texts))

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model predicts."""
        return self.windows[:, 1:].numel()


@dataclass(frozen=True)
class TextQuality:
    perplexity: float
    bits_per_byte: float


@torch.inference_mode()
def predict(model: PreTrainedModel, text: HeldOut) -> TextQuality:
    nats = sum(_nats(model, window) for window in text.windows.to(model.device).split(1))
    return TextQuality(math.exp(nats / text.num_tokens), nats / math.log(2) / max(1, text.num_bytes))


def _nats(model: PreTrainedModel, window: Tensor) -> float:
    logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
