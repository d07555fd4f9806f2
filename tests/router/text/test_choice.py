"""Neither a choice's text nor where stop strings cut it depends on how it is split."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import ServeConfig
from protocol.outputs import FinishReason, TokenLogprobs, TokenOutput
from router.text.choice import Choice, Prompt
from router.text.detokenizer import StopStringMatcher
from router.text.tokenizer import Tokenizer


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
