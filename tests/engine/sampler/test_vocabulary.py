"""A grammar's vocabulary, read from `tokenizer.json` alone, equals llguidance's own over Transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from checkpoints.source import hf_source
from engine.sampler.grammars import load_vocabulary
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from tests.real_models import GEMMA3, SMOLLM2, gguf_file

reads_both = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="this Transformers drops a list of special tokens where others have names",
)

TEXTS = [
    '{"name": "naïve café", "list": [1, 23, 456]}',
    "  two  spaces\n\n\tand a tab",
    "日本語 😀 \u200d",
    "<start_of_turn>user <|im_end|>",
]


def check_equal(config: ServeConfig, vocab_size: int, eos_token_ids: list[int]) -> None:
    ours = load_vocabulary(config, vocab_size, eos_token_ids)
    tokenizer = AutoTokenizer.from_pretrained(hf_source(config.model))
    theirs = from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos_token_ids)
    llg = ours.tokenizer
    assert (llg.vocab_size, llg.eos_tokens) == (theirs.vocab_size, theirs.eos_tokens)
    every = range(llg.vocab_size)
    assert [llg.decode_bytes([each]) for each in every] == [theirs.decode_bytes([each]) for each in every]
    special = [llg.is_special_token(each) for each in every]
    assert special == [theirs.is_special_token(each) for each in every]
    assert not np.any(ours.first_bytes[special] >= 0)
    for text in TEXTS:
        for parses in (False, True):
            found = llg.tokenize_str(text, parse_special=parses)
            assert found == theirs.tokenize_str(text, parse_special=parses)


def bundled(folder: Path) -> str:
    return str(BUNDLED_MODEL)


def marked_by_the_settings(folder: Path, *, in_list: bool = True, by_name: bool = True) -> str:
    """Write a tokenizer that truncates and pads, and whose special tokens only the settings mark."""
    source = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    source["added_tokens"] = []
    fast = Tokenizer.from_str(json.dumps(source))
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    fast.save(str(folder / "tokenizer.json"))
    settings = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())
    decoder = {
        "4097": {"content": "<|extra|>", "special": True},
        "4096": {"content": "plain words", "special": False},
        "7": {"content": fast.id_to_token(7), "special": True},
    }
    added: dict[str, Any] = {"added_tokens_decoder": decoder}
    if in_list:
        added["additional_special_tokens"] = [fast.id_to_token(8), "plain words"]
    if by_name:
        added["extra_special_tokens"] = {"image_token": fast.id_to_token(9)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | added))
    (folder / "config.json").write_text((BUNDLED_MODEL / "config.json").read_text())
    return str(folder)


def smollm2(folder: Path) -> str:
    return str(gguf_file(SMOLLM2))


def gemma3(folder: Path) -> str:
    return str(gguf_file(GEMMA3))


@pytest.mark.parametrize(
    ("model", "vocab_size", "eos_token_ids"),
    [
        (bundled, 4096, [0]),
        (bundled, 100, [0]),
        (bundled, 5000, [0, 5]),
        pytest.param(marked_by_the_settings, 4200, [0, 4097], marks=reads_both),
        (partial(marked_by_the_settings, by_name=False), 4200, [0, 4097]),
        (partial(marked_by_the_settings, in_list=False), 4200, [0, 4097]),
        (smollm2, 49152, [2]),
        (gemma3, 262144, [1, 106]),
    ],
    ids=[
        "bundled",
        "more-than-the-model",
        "fewer-than-the-model",
        "marked",
        "in-a-list",
        "by-name",
        "smollm2",
        "gemma3",
    ],
)
def test_a_vocabulary_is_transformers(
    tmp_path: Path, model: Callable[[Path], str], vocab_size: int, eos_token_ids: list[int]
) -> None:
    check_equal(ServeConfig(model=model(tmp_path)), vocab_size, eos_token_ids)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "not with this model's tokenizer: .*tokenizer.json is not usable"), (None, "has no tokenizer")],
)
def test_an_unusable_tokenizer_is_told_to_the_request(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    config: Any = ServeConfig(model=str(tmp_path))
    with pytest.raises(InvalidRequestError, match=f"grammar: .*{reason}"):
        load_vocabulary(config, 100, [0])
