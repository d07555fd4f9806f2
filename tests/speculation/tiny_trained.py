"""Writes a tiny model with a tokenizer, and text for it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.worker.tiny_model import write_tiny_llama

VOCAB_SIZE = 257
END = 0


def write_tiny_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": END} | {symbol: index for index, symbol in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write_tiny_model(folder: Path) -> None:
    """Write a model with weak layers and strong embeddings, so that it soon repeats itself."""
    write_tiny_tokenizer(folder)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.25}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    write_tiny_llama(folder, seed=0, **shape, **heads)


def write_text(folder: Path, lines: int = 400) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        text = "".join(f"line {number} {index % 7}: the quick brown fox\n" for index in range(lines // 4))
        (folder / f"{number}.txt").write_text(text)
