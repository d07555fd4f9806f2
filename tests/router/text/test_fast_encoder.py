"""The fast encoder gives the same token ids as `tokenizers`."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import fastokens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from models.bundled import BUNDLED_MODEL
from router.text.fast_encoder import PATTERNS, UNSURE, fast_encode
from router.text.tokenizer import Tokenizer

ASCII, FIRST, LATER = b" \t\n\r'!/012abvsLA", range(0xC2, 0xF5), range(0x80, 0xC0)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BUNDLED = (BUNDLED_MODEL / "tokenizer.json").read_text()
WHOLE = [*range(0x3400), *range(0xA000, 0xA980), *range(0xFB00, 0x10200), *range(0xE0000, 0xE0080)]
"""Code points that are all tried, by the pattern that tells most categories apart. Of other ranges, and by
other patterns, the first and last of each run of a category are.
"""


def source_of(name: str) -> dict[str, Any]:
    """Make a tokenizer that merges any two characters that the named pattern keeps together."""
    letters = {byte: chr(byte) for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    pairs = [(ASCII, FIRST), (LATER, ASCII), (LATER, FIRST), (ASCII, ASCII)]
    merges = [(letters[a], letters[b]) for firsts, seconds in pairs for a in firsts for b in seconds]
    vocab = {token: number for number, token in enumerate([*letters.values(), *map("".join, merges)])}
    source = json.loads(BUNDLED)
    source["model"] |= {"vocab": vocab, "merges": merges}
    source["added_tokens"] = []
    if name == "gpt2":
        source["pre_tokenizer"] = {**BYTE_LEVEL, "use_regex": True}
    else:
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[name]}, "behavior": "Isolated"}
        split_first = [{**split, "invert": False}, {**BYTE_LEVEL, "use_regex": False}]
        source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": split_first}
    if name == "qwen2":
        source["normalizer"] = {"type": "NFC"}
    return source


def characters(whole: bool) -> Iterator[str]:
    if whole:
        yield from (chr(code) for code in WHOLE if not 0xD800 <= code < 0xE000)
    every = (chr(code) for code in range(0x3400 * whole, 0x32000) if not 0xD800 <= code < 0xE000)
    for _, run in groupby(every, unicodedata.category):
        first, *rest = run
        yield from {first, *rest[-1:]}


@pytest.mark.parametrize("name", ["gpt2", *PATTERNS])
def test_patterns_split_equally_at_every_character(name):
    tokenizer = FastTokenizer.from_str(json.dumps(source_of(name)))
    encode = fast_encode(tokenizer)
    assert encode is not None
    probes = [f"a{c}b1{c}2 {c}!{c}{c} A{c}\n{c}'s {c}\n" for c in characters(name == "o200k") if c != UNSURE]
    for start in range(0, len(probes), 64):
        text = "".join(probes[start : start + 64])
        assert encode(text, False) == tokenizer.encode_batch_fast([text])[0].ids


PIECES = st.sampled_from(
    [
        *("'s", "'LL", "'ve", "0", "1234", "a", "Ab", "the", "!", "//"),
        *("é", "e\u0301", "İ", "ſ", "日本", "🙂"),
        *(" ", "  ", "\t", "\n", "\r\n", "def f(x):", "<|a|>", "<|endoftext|>", "<|end", "keep"),
        *("\u200d", "\u3000", "\x85", "\xa0", UNSURE, "\u0300", "\0"),
    ]
)


@pytest.fixture(scope="module")
def tokenizers() -> list[tuple[Tokenizer, FastTokenizer]]:
    """Make the bundled tokenizer and one for each pattern, with added tokens."""
    made = []
    for source in [BUNDLED, *(json.dumps(source_of(name)) for name in ["gpt2", *PATTERNS])]:
        fast = FastTokenizer.from_str(source)
        fast.add_special_tokens(["<|a|>"])
        fast.add_tokens([AddedToken("keep", normalized=False)])
        start = [("<|a|>", fast.token_to_id("<|a|>"))]
        fast.post_processor = TemplateProcessing(single="<|a|> $A", pair=None, special_tokens=start)
        ours = Tokenizer(fast.to_str(), {})
        assert ours._fast_encode is not None
        made.append((ours, fast))
    return made


@given(st.lists(PIECES | st.text(max_size=8), max_size=30).map("".join))
@settings(max_examples=40, deadline=None)
def test_ids_equal_those_of_tokenizers(tokenizers, text):
    for ours, theirs in tokenizers:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special).ids


def with_(path: str, value: Any) -> dict[str, Any]:
    source = json.loads(BUNDLED)
    *parents, name = path.split(".")
    place = source
    for parent in parents:
        place = place[int(parent) if parent.isdecimal() else parent]
    place[name] = value
    return source


@pytest.mark.parametrize(
    "source",
    [
        with_("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\p{L}+|[^\p{L}]"}),
        with_("pre_tokenizer.pretokenizers.0.behavior", "MergedWithNext"),
        with_("pre_tokenizer.pretokenizers.1.add_prefix_space", True),
        with_("pre_tokenizer", None),
        with_("normalizer", {"type": "Lowercase"}),
        with_("model.dropout", 0.5),
        with_("model.byte_fallback", True),
        with_("added_tokens.0.rstrip", True),
    ],
)
def test_unknown_patterns_use_tokenizers(source):
    assert fast_encode(FastTokenizer.from_str(json.dumps(source))) is None


def test_different_ids_are_found_at_the_start(monkeypatch, caplog):
    other = json.loads(BUNDLED)
    other["model"]["merges"][100:102] = reversed(other["model"]["merges"][100:102])
    del other["model"]["merges"][2000]
    wrong = fastokens.Tokenizer.from_json_str(json.dumps(other))
    monkeypatch.setattr(fastokens.Tokenizer, "from_json_str", lambda source: wrong, raising=False)
    ours = Tokenizer(BUNDLED, {})
    assert "fastokens has other ids for" in caplog.text
    assert ours.encode("def f(x):") == FastTokenizer.from_str(BUNDLED).encode("def f(x):").ids
