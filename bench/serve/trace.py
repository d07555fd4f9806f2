"""Replays request traces in Mooncake's JSONL form.

Each line holds `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for every
512-token block of the prompt. Equal ids stand for equal tokens, so a trace keeps the prefix sharing
of the requests it was taken from. Format: https://github.com/kvcache-ai/Mooncake (FAST25-release).
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.serve.workload import LoadRequest, random_tokens

TRACE_BLOCK_TOKENS = 512


class TraceLine(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceFit:
    """How a trace is fitted to the model and the machine.

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
        if self.scale_lengths <= 0:
            raise ValueError(f"--trace-scale-lengths must be above 0, got {self.scale_lengths}")
        if self.speedup <= 0:
            raise ValueError(f"--trace-speedup must be above 0, got {self.speedup}")


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """Read the first `limit` requests of a trace; raises ValueError naming the bad line."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if len(lines) == limit:
            break
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if line.input_length > len(line.hash_ids) * TRACE_BLOCK_TOKENS:
            raise ValueError(
                f"{path}, line {number}: input_length {line.input_length} needs more than "
                f"{len(line.hash_ids)} hash_ids of {TRACE_BLOCK_TOKENS} tokens"
            )
        lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no requests")
    return lines


class _Blocks:
    """The tokens that stand for each hash id; the same id gives the same tokens in every run of a seed."""

    def __init__(self, block_len: int, vocab_size: int, seed: int) -> None:
        self._block_len = block_len
        self._vocab_size = vocab_size
        self._seed = seed
        self._tokens: dict[int, list[int]] = {}

    def __getitem__(self, hash_id: int) -> list[int]:
        if hash_id not in self._tokens:
            rng = np.random.default_rng((self._seed, hash_id))
            self._tokens[hash_id] = random_tokens(rng, self._block_len, self._vocab_size)
        return self._tokens[hash_id]


def to_requests(lines: list[TraceLine], fit: TraceFit, vocab_size: int, seed: int) -> list[LoadRequest]:
    """Turn trace lines into requests with token-id prompts and arrival times in seconds.

    The first request arrives at 0.
    """
    blocks = _Blocks(max(1, round(TRACE_BLOCK_TOKENS * fit.scale_lengths)), vocab_size, seed)
    start = min(line.timestamp for line in lines)
    requests: list[LoadRequest] = []
    for line in sorted(lines, key=lambda line: line.timestamp):
        input_len = _fit(line.input_length, fit.scale_lengths, fit.max_input_len)
        prompt: list[int] = []
        for hash_id in line.hash_ids:
            if len(prompt) >= input_len:
                break
            prompt += blocks[hash_id]
        requests.append(
            LoadRequest(
                prompt[:input_len],
                _fit(line.output_length, fit.scale_lengths, fit.max_output_len),
                (line.timestamp - start) / 1000.0 / fit.speedup,
            )
        )
    return requests


def _fit(length: int, scale: float, limit: int | None) -> int:
    scaled = max(1, round(length * scale))
    return scaled if limit is None else min(scaled, limit)
