"""Encoding of texts with `fastokens`, which takes a tenth of the time of `tokenizers`.

It serves the tokenizers whose ids were compared at every code point and by fuzzing: byte-level BPE with one
of the patterns below (`tests/router/text/test_fast_encoder.py`). All others stay with `tokenizers`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

logger = logging.getLogger(__name__)

Encode = Callable[[str, bool], list[int]]
"""A function that encodes a text; the flag says whether special tokens are added."""

UNSURE = "\u180e"
"""A character that is a space for only one of the two regex libraries."""

_TIKTOKEN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "tandem": _TIKTOKEN[0] % "1,3",
    "llama3": _TIKTOKEN[1] + _TIKTOKEN[0] % "1,3",
    "qwen2": _TIKTOKEN[1] + _TIKTOKEN[0].replace("{%s}", ""),
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIX}|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIX}|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns of pretokenizers by the model that introduced them. `tokenizers` itself has GPT-2's."""

MAX_PROBES = 4096
PROBE_TOKENS = 64


def fast_encode(tokenizer: FastTokenizer) -> Encode | None:
    """Return an encoder that releases the GIL; None if its ids may differ."""
    if not _is_known(tokenizer):
        return None
    try:
        from fastokens import Tokenizer as Fastokens

        fast = Fastokens.from_json_str(tokenizer.to_str())
    except (ImportError, ValueError) as error:
        logger.warning("prompts are tokenized ten times slower, without fastokens: %s", error)
        return None

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return fast.encode(text, add_special_tokens).ids

    for probe in _probes(tokenizer):
        if encode(probe, True) != tokenizer.encode_batch_fast([probe])[0].ids:
            logger.warning("prompts are tokenized ten times slower: fastokens has other ids for %r", probe)
            return None
    return encode


def component(part: Any) -> Any:
    """Return a tokenizer's normalizer, decoder or other part but its model as `tokenizer.json` has it."""
    return None if part is None else json.loads(part.__getstate__())


def _is_known(tokenizer: FastTokenizer) -> bool:
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    return (
        isinstance(model, BPE)
        and not any((model.dropout, model.unk_token, model.byte_fallback, model.fuse_unk))
        and not any((model.continuing_subword_prefix, model.end_of_word_suffix))
        and component(tokenizer.normalizer) in (None, {"type": "NFC"})
        and _splits_as_known(component(tokenizer.pre_tokenizer))
        and not any(token.single_word or token.lstrip or token.rstrip for token in added)
    )


def _splits_as_known(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in PATTERNS.values()
    return False


def _probes(tokenizer: FastTokenizer) -> Iterator[str]:
    """Yield test texts of this vocabulary: evenly chosen tokens, `PROBE_TOKENS` at a time."""
    size = tokenizer.get_vocab_size()
    token_ids = iter(range(0, size, -(-size // MAX_PROBES)))
    while some := list(islice(token_ids, PROBE_TOKENS)):
        yield tokenizer.decode(some, skip_special_tokens=False)
