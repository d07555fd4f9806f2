"""Stop strings cut texts exactly, however these are split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.detokenizer import StopStringMatcher

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
