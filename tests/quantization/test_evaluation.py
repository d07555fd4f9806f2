"""Perplexity and bits per byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from quantization.evaluation import HeldOut, predict
from tests.quantization.tiny import tiny_model, windows
from tests.speculation.tiny_trained import write_tiny_tokenizer


def test_perplexity_and_bits_per_byte(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokens = windows()
    tokens[:, 1:] = tokens[:, 1:].clamp(1, 80)
    text = HeldOut.of(tokens, AutoTokenizer.from_pretrained(tmp_path))
    assert text.num_tokens == 6 * 31
    assert text.num_bytes == 6 * 31, "ASCII is a byte a token"
    model = tiny_model()
    found = predict(model, text)
    nats = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    assert found.perplexity == pytest.approx(math.exp(nats), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2), rel=1e-5)
