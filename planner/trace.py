"""Request traces in Mooncake's JSONL form.

Each line holds `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for every
512-token block of the prompt. Equal ids stand for equal tokens, so a trace keeps the prefix sharing
of the requests it was taken from. Format: https://github.com/kvcache-ai/Mooncake (FAST25-release).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError

TRACE_BLOCK_TOKENS = 512

_Length = Annotated[int, Meta(ge=1, le=2**31)]


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceFit:
    """How to fit a trace to the model and the machine.

    Attributes:
        scale_lengths: factor on every length, block length included, so sharing stays the same.
        max_input_len: longer prompts are cut after this many tokens.
        max_output_len: longer outputs are cut to this many tokens.
        speedup: factor by which requests arrive faster than recorded.
    """

    scale_lengths: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    speedup: float = 1.0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--trace-scale-lengths", self.scale_lengths),
            ("--trace-speedup", self.speedup),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"{flag} must be above 0, got {value}")

    @property
    def block_tokens(self) -> int:
        return max(1, round(TRACE_BLOCK_TOKENS * self.scale_lengths))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request to send: `arrival` is in seconds after the first request's, lengths are in tokens."""

    arrival: float
    input_len: int
    output_len: int
    hash_ids: Sequence[int]


class TraceError(ConfigError, ValueError):
    """The file is not a trace; the message names the line and the field."""


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """Read the first `limit` requests of a trace. Raises `TraceError`."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    for number, raw in enumerate(content.splitlines(), start=1):
        if len(lines) == limit:
            break
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if line.input_length > len(line.hash_ids) * TRACE_BLOCK_TOKENS:
            raise TraceError(
                f"{path}, line {number}: input_length {line.input_length} needs more than "
                f"{len(line.hash_ids)} hash_ids of {TRACE_BLOCK_TOKENS} tokens"
            )
        lines.append(line)
    if not lines:
        raise TraceError(f"{path} holds no requests")
    return lines


def fitted(lines: Sequence[TraceLine], fit: TraceFit) -> list[TraceRequest]:
    """Return the trace's requests in order of arrival. The first arrives at 0."""
    start = min(line.timestamp for line in lines)
    return [
        TraceRequest(
            (line.timestamp - start) / 1000.0 / fit.speedup,
            _fit(line.input_length, fit.scale_lengths, fit.max_input_len),
            _fit(line.output_length, fit.scale_lengths, fit.max_output_len),
            line.hash_ids,
        )
        for line in sorted(lines, key=lambda line: line.timestamp)
    ]


def _fit(length: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(length * scale))
    return scaled if limit is None else min(scaled, limit)
