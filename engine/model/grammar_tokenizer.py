"""The model's vocabulary, as grammars read it."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from checkpoints.source import hf_source
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError


def load_grammar_tokenizer(config: ServeConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Raises `InvalidRequestError`, for the request that needs it."""
    if not eos_token_ids:
        raise InvalidRequestError("grammar", "the model has no end-of-sequence token")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_source(config.tokenizer_source, config.revision),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), list(eos_token_ids))
    except Exception as error:  # of several libraries
        raise InvalidRequestError("grammar", f"not with this model's tokenizer: {error}") from error
