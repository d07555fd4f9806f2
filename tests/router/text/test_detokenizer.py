"""Tokens become text: detokenizers, and choices that are cut at stops, however steps and characters lie."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from protocol.config import ServeConfig
from protocol.outputs import FinishReason, TokenLogprobs, TokenOutput
from router.text.choice import Choice, Prompt
from router.text.detokenizer import StopStringMatcher, WindowDetokenizer
from router.text.tokenizer import Tokenizer

TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab  \n🙂👩‍👩‍👧e\u0301日本\u0903")), max_size=40
).filter(lambda text: "<|end|>" not in text)  # the tokenizer's special token is no text


@functools.cache
def sentencepiece_like(strip: bool) -> Tokenizer:
    """Make a tokenizer like Llama 2's (with `strip`) or Gemma's: pieces with ▁, other characters as bytes."""
    pieces = ["▁", "a", "b", "▁a", "▁▁", "ab", "é", "日", "the", "▁the", "\n"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    fast.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace])
        if strip
        else normalizers.Sequence([replace])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return Tokenizer(fast.to_str(), {"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def metaspace() -> Tokenizer:
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -2.0), ("a", -3.0), ("b", -3.0), ("é", -3.0), ("日本", -3.0)]
    fast = FastTokenizer(models.Unigram(vocab, unk_id=0))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return Tokenizer(fast.to_str(), {})


@pytest.fixture(scope="module")
def byte_level(model_folder) -> Tokenizer:
    return Tokenizer((model_folder / "tokenizer.json").read_text(), {"eos_token": "<|end|>"})


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], **options) -> list[str]:
    detokenizer = tokenizer.detokenizer([], **options)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_byte_level_text(byte_level, text):
    pieces = pieces_of(byte_level, byte_level.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 599), max_size=40), skip=st.booleans())
def test_byte_level_any_tokens(byte_level, token_ids, skip):
    pieces = pieces_of(byte_level, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == byte_level.decode(token_ids, skip)


@pytest.mark.parametrize("strip", [True, False])
@settings(max_examples=80, deadline=None)
@given(text=TEXT)
@example(text="  two  spaces 日本🙂é")
def test_sentencepiece_text(strip, text):
    tokenizer = sentencepiece_like(strip)
    token_ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == text.replace("▁", " ")
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_sentencepiece_continues_after_a_prompt():
    """Only a text's very start loses its space."""
    tokenizer = sentencepiece_like(strip=True)
    word = tokenizer.encode("a")
    assert tokenizer.token_bytes(word[0]) == b" a"
    assert tokenizer.detokenizer(tokenizer.encode("the")).push(word[0]) == " a"
    assert tokenizer.detokenizer([]).push(word[0]) == "a"
    assert tokenizer.detokenizer([1]).push(word[0]) == "a"


@settings(max_examples=80, deadline=None)
@given(token_ids=st.lists(st.integers(1, 6), max_size=20))
def test_metaspace(token_ids):
    tokenizer = metaspace()
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=80, deadline=None)
@given(text=TEXT)
def test_window_text(byte_level, text):
    """The method for unknown decoders gives the same text."""
    detokenizer = WindowDetokenizer(byte_level._fast, [], frozenset())
    pieces = [detokenizer.push(token_id) for token_id in byte_level.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text


def test_wordpiece_takes_the_window():
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3, "##b": 4}
    fast = FastTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(fast.to_str(), {})
    token_ids = [1, 2, 3, 4, 1]
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "playing ab play"


def test_half_a_character_at_the_prompts_end(byte_level):
    """The answer's first tokens complete it."""
    token_ids = byte_level.encode("🛰")
    assert len(token_ids) == 3
    detokenizer = byte_level.detokenizer(token_ids[:1])
    assert [detokenizer.push(token_id) for token_id in token_ids[1:]] == ["", "🛰"]


def test_unknown_ids_have_no_text(byte_level):
    assert pieces_of(byte_level, [5000, 6000]) == ["", "", ""]
    assert byte_level.token_bytes(5000) == b""


def trimming(byte_level: Tokenizer) -> Tokenizer:
    """Make a tokenizer like Llama 3's: its offsets leave spaces out, and texts begin with a special token."""
    fast = FastTokenizer.from_buffer(byte_level.as_json())
    begin = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 1)])
    fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return Tokenizer(fast.to_str(), {})


@pytest.fixture(scope="module")
def kinds(byte_level) -> list[Tokenizer]:
    return [trimming(byte_level), sentencepiece_like(True), sentencepiece_like(False)]


@settings(max_examples=80, deadline=None)
@given(text=TEXT)
def test_a_prompts_offsets_equal_its_pieces(kinds, text):
    for tokenizer in kinds:
        told = tokenizer.echo(text, False)
        assert told.text == text
        assert told.offsets == tokenizer.echo_tokens(tokenizer.encode(text, False), False).offsets


def test_offsets_of_added_special_and_normalized_tokens(byte_level):
    tokenizer = trimming(byte_level)
    text = "a<|end|> b"
    assert tokenizer.echo(text, True).offsets == [0, 0, 1, 8, 9]
    assert tokenizer.encode(text) == tokenizer.encode("<|pad|>" + text, False)
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0, "fine": 1, "##s": 2, "day": 3}, unk_token="[UNK]"))
    fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(fast.to_str(), {}).echo("x ﬁNEs  Day", True).offsets == [0, 2, 5, 8]


def run(tokenizer: Tokenizer, steps: list[list[int]], finish: FinishReason = "length", **options):
    """Return text, counted tokens and reasons, taking the news after every step."""
    choice = Choice(0, Prompt([5]), tokenizer.detokenizer([5]), keep_details=True, **options)
    text, token_ids, logprobs, offsets = "", [], [], []
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        choice.push(
            TokenOutput(
                request_id="r",
                token_ids=step,
                logprobs=[TokenLogprobs(-float(token_id), 1) for token_id in step],
                finish_reason=finish if last else None,
            )
        )
        delta = choice.take_delta()
        text += delta.text
        token_ids += delta.token_ids
        logprobs += [entry.logprob for entry in delta.all_logprobs()]
        offsets += delta.offsets
        if choice.finish_reason is not None:
            break
    assert choice.num_tokens == len(token_ids) == len(offsets)
    assert logprobs == [-float(token_id) for token_id in token_ids]
    return text, token_ids, offsets, choice.finish_reason, choice.stop_reason


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 599), min_size=1, max_size=5), min_size=1, max_size=8),
    stops=st.lists(st.text("the o", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    finish=st.sampled_from(["length", "stop"]),
)
def test_step_boundaries_do_not_matter(model_folder, steps, stops, include, min_tokens, finish):
    tokenizer = _tokenizer(str(model_folder))
    options = {"stop": stops, "include_stop": include, "min_tokens": min_tokens}

    def outcome(steps):
        return run(tokenizer, steps, finish, **options)

    token_ids = [token_id for step in steps for token_id in step]
    one_by_one = [[token_id] for token_id in token_ids]
    assert outcome(steps) == outcome([token_ids]) == outcome(one_by_one)


@functools.cache
def _tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.load(ServeConfig(model=folder))


ALPHABET = "ab\n🙂"


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut by definition: the text ends at the first character at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_equals_cutting_the_whole_text(pieces, stops, include):
    text, matched = cut("".join(pieces), stops, include)
    matcher = StopStringMatcher(stops, include)
    assert "".join(matcher.push(piece) for piece in pieces) + matcher.flush() == text
    assert matcher.matched == matched


@settings(max_examples=120, deadline=None)
@given(
    pieces=st.lists(st.text(ALPHABET, max_size=4), max_size=8),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_only_a_possible_beginning_of_a_stop_is_held_back(pieces, stops):
    matcher = StopStringMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)
