"""A byte-level BPE tokenizer with an exact vocabulary size, for models with random weights."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def _synthetic_words(seed: int) -> Iterator[str]:
    """Yield lines of made-up words that allow thousands of merges, so that no corpus is needed."""
    rng = np.random.default_rng(seed)
    for _ in range(4000):
        lengths = rng.integers(2, 12, size=12)
        words = (_LETTERS[rng.integers(0, len(_LETTERS), size=n)] for n in lengths)
        yield " ".join(word.tobytes().decode() for word in words)


@functools.cache
def _trained(vocab_size: int, seed: int) -> str:
    """Return the tokenizer as JSON. Training takes a second."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_synthetic_words(seed), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the synthetic corpus gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return str(tokenizer.to_str())


def build_tokenizer(vocab_size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on synthetic words.

    Every byte has a token, so any text round-trips. The end-of-text token has id 0. Raises ValueError if
    `vocab_size` cannot hold the 256 bytes and the special token.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (256 bytes and a special token), got {vocab_size}")
    tokenizer = Tokenizer.from_str(_trained(vocab_size, seed))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Write `tokenizer.json` and its configuration into `folder`."""
    tokenizer = build_tokenizer(vocab_size)
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
