"""Stop strings, cut exactly, however the text is split into tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes streamed text through, up to the first complete stop string.

    If several are complete at the same character, the longest counts. Only text that may be the beginning of
    a stop string is held back. The result doesn't depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Accept more text. Returns the text that is certain to be output; nothing after a match
        (`matched`).
        """
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            end, stop = found
            self.matched, self._held = stop, ""
            return text[:end] if self._include_stop else text[: end - len(stop)]
        keep = possible_start(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the text that was held back: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = end, stop
        return best


def possible_start(text: str, words: Sequence[str]) -> int:
    """Return the index of the longest suffix of `text` that is a prefix of one of `words`."""
    keep = len(text)
    for word in words:
        start = text.find(word[0], max(0, len(text) - len(word) + 1), keep)
        while start >= 0:
            if word.startswith(text[start:]):
                keep = start
                break
            start = text.find(word[0], start + 1, keep)
    return keep
