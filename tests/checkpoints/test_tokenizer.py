"""Tokenizers of GGUF files equal those that Transformers builds from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType
from transformers import AutoTokenizer

from checkpoints.gguf import config
from checkpoints.gguf.config import gguf_folder
from checkpoints.gguf.reader import GgufFile
from checkpoints.source import hf_source
from checkpoints.tokenizer import TokenizerSource, load_files
from native import ownership
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.reading.prepared import load_defaults
from tests.checkpoints.gguf_writer import ALPHABET, USER_DEFINED, byte_level, write_raw

TEXTS = [
    "Hello world, hell 12345!",
    "  two  spaces\n\n\tDON'T we'll",
    "naïve café 你好 😀",
    "<s>odd</s> <think>",
    "ЁЖИК е\u0301",
]
FIELDS: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 8,
    "attention.head_count": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write(path: Path, tokenizer: dict[str, Any], architecture: str = "llama", **others: Any) -> Path:
    metadata = {f"{architecture}.{name}": value for name, value in FIELDS.items()} | others
    write_raw(path, architecture, metadata | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}, {})
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))


def sentence_piece() -> dict[str, Any]:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    pieces = ["▁", "h", "e", "l", "o", "▁h", "he", "ll", "▁he", "hell", "▁hell", "<think>", "\n", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(place) for place in range(len(tokens))],
        "token_type": [2, 3, 3] + [6] * 256 + [USER_DEFINED if "think" in piece else 1 for piece in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


splits_as_gpt2 = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="this Transformers splits texts as GPT-2 does whatever the file says",
)


@pytest.mark.parametrize(
    "pre",
    ["default", "llama-bpe", "gpt-4o", "dbrx"]
    + [pytest.param(pre, marks=splits_as_gpt2) for pre in ("qwen2", "qwen35", "tekken")],
)
def test_byte_level_tokenizers(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(280, pre) | {"add_bos_token": pre == "llama-bpe"}
    check(write(tmp_path / "model.gguf", tokenizer))


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentence_piece(tmp_path: Path, adds_space: bool) -> None:
    tokenizer = sentence_piece() | {"add_space_prefix": adds_space, "add_bos_token": True}
    folder = gguf_folder(write(tmp_path / "model.gguf", tokenizer))
    ours = AutoTokenizer.from_pretrained(folder)
    hello = ["<s>", "▁hell" if adds_space else "hell", "o"]
    assert ours.convert_ids_to_tokens(ours("hello").input_ids) == hello
    for text in [text for text in TEXTS if "<" not in text]:
        ids = ours(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == text


def test_gemma_4_has_merges_in_the_file_and_no_first_token(tmp_path: Path) -> None:
    tokenizer = sentence_piece() | {"model": "gemma4", "add_space_prefix": False, "add_bos_token": True}
    tokenizer["merges"] = ["l l", "h e", "he ll", "▁ hell"]
    fields: dict[str, Any] = {"attention.sliding_window": 8, "attention.key_length_swa": 8}
    fields |= {"attention.sliding_window_pattern": [True, False], "block_count": 2}
    metadata = {f"gemma4.{name}": value for name, value in (FIELDS | fields).items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    freqs = {"rope_freqs.weight": (np.ones(4, np.float32), GGMLQuantizationType.F32)}
    write_raw(tmp_path / "m.gguf", "gemma4", metadata, freqs)
    ours = AutoTokenizer.from_pretrained(gguf_folder(tmp_path / "m.gguf"))
    assert ours.convert_ids_to_tokens(ours("hello hell").input_ids) == ["hell", "o", "▁hell"]


def check(path: Path) -> None:
    ours = AutoTokenizer.from_pretrained(gguf_folder(path))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    composes = ours.backend_tokenizer.normalizer is not None
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == expected, text
        if not composes:
            assert ours.decode(expected) == text


def test_a_stopped_process_that_makes_the_folder_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one makes it; if the first goes on, it keeps that folder."""
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(ownership, "_LOCK_WAIT", 0.1)
    path, write_files = write(tmp_path / "model.gguf", byte_level(280)), config._write
    folders: list[Path] = []

    def stopped(file: GgufFile, folder: Path) -> None:
        monkeypatch.setattr(config, "_write", write_files)
        folders.append(gguf_folder(path))
        write_files(file, folder)

    monkeypatch.setattr(config, "_write", stopped)
    assert [gguf_folder(path)] == folders
    assert [each.name for each in folders[0].glob("tokenizer.json")]


def test_digits_are_split_into_single_tokens(tmp_path: Path) -> None:
    ours = AutoTokenizer.from_pretrained(gguf_folder(write(tmp_path / "m.gguf", byte_level(280, "smollm"))))
    assert ours.tokenize("123") == ["1", "2", "3"]
    other = AutoTokenizer.from_pretrained(gguf_folder(write(tmp_path / "n.gguf", byte_level(280))))
    assert other.tokenize("123") == ["123"]


@pytest.mark.parametrize(
    ("texts", "named", "ends"),
    [
        (["<|end|>", "<|endoftext|>"], {"eos_token_id": 279}, [279, 278]),
        (["<|eom_id|>", "<|eot_id|>"], {"eos_token_id": 1, "eot_token_id": 279}, [1, 279, 278]),
        (["<|end|>", "<|return|>", "<|call|>"], {"eos_token_id": 278, "eot_token_id": 277}, [278, 279]),
        (["<eos>", "<turn|>"], {"eos_token_id": 279}, [279, 278]),
        (["<|im_end|>"], {"eos_token_id": 2**32 - 1}, [279]),
        ([], {}, [1]),
    ],
    ids=["phi-3", "llama-3", "gpt-oss", "gemma-4", "-1 for none", "none of these"],
)
def test_tokens_that_end_an_answer(
    tmp_path: Path, texts: list[str], named: dict[str, Any], ends: list[int]
) -> None:
    """Files of Phi 3 name the end of a text, but not that of a turn."""
    tokenizer = byte_level(280)
    tokenizer["tokens"] = [*tokenizer["tokens"][: 280 - len(texts)], *texts]
    folder = gguf_folder(write(tmp_path / "model.gguf", tokenizer | named))
    for name in ("config.json", "generation_config.json"):
        found = json.loads((folder / name).read_text())["eos_token_id"]
        assert found == (ends if len(ends) > 1 else ends[0])


def test_tokens_that_are_none_are_left_out(tmp_path: Path) -> None:
    """A padding token outside the vocabulary would stop the making of the embeddings."""
    folder = gguf_folder(write(tmp_path / "m.gguf", byte_level(280) | {"padding_token_id": 2**32 - 1}))
    assert "pad_token_id" not in json.loads((folder / "config.json").read_text())


def test_sampling_parameters_of_the_file_are_the_defaults(tmp_path: Path) -> None:
    """Files have those of the model's generation_config.json since llama.cpp applies them."""
    stored: dict[str, Any] = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    metadata = {f"general.sampling.{name}": value for name, value in stored.items()}
    path = write(tmp_path / "model.gguf", byte_level(280), **metadata)
    assert load_defaults(ServeConfig(model=str(path))).sampling == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    plain = write(tmp_path / "plain.gguf", byte_level(280))
    assert load_defaults(ServeConfig(model=str(plain))).sampling == {}


def test_named_templates(tmp_path: Path) -> None:
    others: dict[str, Any] = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    ours = AutoTokenizer.from_pretrained(gguf_folder(write(tmp_path / "m.gguf", byte_level(280), **others)))
    assert ours.chat_template == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model: is 'bert', not gpt2, llama or gemma4: .*--tokenizer"),
        ({"pre": "odd"}, r"tokenizer\.ggml\.pre: 'odd' is not known: .*--tokenizer"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type: has 2 entries for 280 tokens"),
        ({"add_bos_token": True, "bos_token_id": 999}, r"tokenizer\.ggml\.bos_token_id: is 999"),
        ({"merges": [1, 2]}, r"its tokenizer cannot be used: AttributeError"),
        ({"merges": ["h u"]}, r"tokenizer\.ggml\.merges: .*`hu` out of vocabulary"),
        (
            {"tokens": [*ALPHABET, *"helloo", *("he", "ll", "hell", "Ġw", "12", "123"), *"abcdefghijkl"]},
            "280 tokens, of which 262",
        ),
    ],
)
def test_an_unsupported_tokenizer_is_a_clear_error(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """Another one may be named instead."""
    model = str(write(tmp_path / "model.gguf", byte_level(280) | change))
    with pytest.raises(ConfigError, match=rf"^--model: {model}: .*{reason}"):
        load_files(TokenizerSource.of(ServeConfig(model=model)))
    other = str(write(tmp_path / "other.gguf", byte_level(280)))
    served = ServeConfig(model=model, tokenizer=other)
    assert load_files(TokenizerSource.of(served)) == load_files(TokenizerSource.of(ServeConfig(model=other)))
    assert (Path(hf_source(model)) / "config.json").exists()
