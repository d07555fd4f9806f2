"""Detokenizers: token ids become text, one token at a time, never half a character.

Byte-level and SentencePiece-like decoders map each token to bytes independently, so a table and an
incremental UTF-8 decoder suffice. Any other decoder decodes the last few tokens again with each new one.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

MAX_CHARACTER_BYTES = 4
CONTEXT_TOKENS = 6
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""

    def flush(self) -> str:
        """Return the rest of the text at the end; an incomplete character becomes U+FFFD."""


@dataclass(frozen=True)
class PieceDecoding:
    """A map of token strings to bytes; the first `leading_spaces` of a text are dropped."""

    to_bytes: Callable[[str], bytes]
    leading_spaces: int = 0


def piece_decoding(decoder: Mapping[str, Any] | None) -> PieceDecoding | None:
    """Read a `tokenizer.json` decoder. Return None if it does not decode token by token."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds[:1] == ["ByteLevel"] and all(kind == "Fuse" for kind in kinds[1:]):
        return PieceDecoding(_byte_level_bytes)
    if kinds == ["Metaspace"]:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return PieceDecoding(_replacing([(steps[0]["replacement"], " ")], False), 2**31 if strips else 0)
    return _sentencepiece_decoding(steps)


def _sentencepiece_decoding(steps: Sequence[Mapping[str, Any]]) -> PieceDecoding | None:
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    leading_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                leading_spaces = start
            case _:
                return None
    if not fused:
        return None
    return PieceDecoding(_replacing(replacements, byte_fallback), leading_spaces)


def _replacing(replacements: Sequence[tuple[str, str]], byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match.group(1))
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map of characters to bytes: printable bytes as they are, the others shifted up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(shifted)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, filled on demand. Ids that the tokenizer does not know have no bytes."""

    def __init__(self, tokenizer: FastTokenizer, decoding: PieceDecoding, skip: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._skip = skip

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skip else self._tokenizer.id_to_token(token_id)
        raw = self[token_id] = b"" if token is None else self._decoding.to_bytes(token)
        return raw


class TokenTexts(dict[int, str | None]):
    """Text by token id; None if the token's bytes are not whole characters."""

    def __init__(self, table: TokenBytes) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self.table[token_id].decode()
        self[token_id] = text
        return text


class BytesDetokenizer:
    """A detokenizer for decoders that work token by token. `context`: tokens before the first pushed one."""

    __slots__ = ("_decoder", "_is_between", "_strip", "_texts")

    def __init__(self, texts: TokenTexts, context: Sequence[int], leading_spaces: int) -> None:
        self._texts = texts
        self._decoder = _utf8_decoder("replace")
        self._is_between = True
        """Whether the last character is complete."""
        for token_id in context[-MAX_CHARACTER_BYTES:]:
            self._decode(token_id)
        self._strip = leading_spaces

    def push(self, token_id: int) -> str:
        if self._is_between and not self._strip and (text := self._texts[token_id]) is not None:
            return text
        text = self._decode(token_id)
        if self._strip and text:
            kept = text.lstrip(" ")
            stripped = min(len(text) - len(kept), self._strip)
            self._strip = 0
            return text[stripped:]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def _decode(self, token_id: int) -> str:
        text = self._decoder.decode(self._texts.table[token_id])
        self._is_between = not self._decoder.getstate()[0]
        return text


class WindowDetokenizer:
    """A detokenizer for other decoders: the last few tokens with the new one, minus those without it."""

    MAX_HELD_TOKENS = 32

    def __init__(self, tokenizer: FastTokenizer, context: Sequence[int], skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._token_ids = list(context[-CONTEXT_TOKENS:])
        self._read = len(self._token_ids)

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._token_ids[: self._read])
        after = self._decode(self._token_ids)
        held = len(self._token_ids) - self._read
        incomplete = after.endswith("\ufffd") or len(after) <= len(before)
        if incomplete and not final and held < self.MAX_HELD_TOKENS:
            return ""
        self._token_ids = self._token_ids[self._read :]
        self._read = len(self._token_ids)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._skip]
        return self._tokenizer.decode(shown, skip_special_tokens=False)


class StopStringMatcher:
    """A filter of streamed text that stops at the first complete stop string.

    If several are complete at the same character, the longest counts. Only text that may begin a stop string
    is held back. The result does not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append text. Return the text that is certain to be output; "" after a match (`matched`)."""
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
        """Return the text that was held back, once no more text follows."""
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
