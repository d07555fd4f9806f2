"""Prompts, output lengths and arrival times of a load.

The prompts of a trace are token ids which share the prefixes that the recorded prompts shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from planner.trace import TraceFit, TraceLine, fitted

# Ids below this are special tokens in most vocabularies; random prompts do not use them.
FIRST_ORDINARY_TOKEN = 16


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load: a prompt (text or token ids) and the number of tokens to generate.

    `arrival` is in seconds from the start of the load; None means "as soon as there is room". Prefixes are
    shared only with requests of the same `salt`.
    """

    prompt: str | list[int]
    output_len: int
    arrival: float | None = None
    salt: str = ""


class PromptLine(msgspec.Struct):
    """One line of a prompt file. `max_tokens` overrides the load's output length."""

    prompt: str | list[int]
    max_tokens: int | None = None


def random_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Return `count` ordinary token ids below `vocab_size`."""
    if vocab_size <= FIRST_ORDINARY_TOKEN:
        raise ValueError(f"--vocab-size must be above {FIRST_ORDINARY_TOKEN}, got {vocab_size}")
    return rng.integers(FIRST_ORDINARY_TOKEN, vocab_size, size=count).tolist()


def synthetic(
    num_prompts: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
) -> list[LoadRequest]:
    """Return requests with prompts of random token ids.

    The first `prefix_len` tokens are the same in all prompts; `input_len` counts the rest. With a
    `range_ratio` r in [0, 1), lengths are uniform in [len * (1 - r), len * (1 + r)].
    """
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {range_ratio}")
    rng = np.random.default_rng(seed)
    prefix = random_tokens(rng, prefix_len, vocab_size)

    def length(mean: int) -> int:
        low, high = int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))
        return max(1, int(rng.integers(low, high + 1)))

    return [
        LoadRequest(prefix + random_tokens(rng, length(input_len), vocab_size), length(output_len))
        for _ in range(num_prompts)
    ]


def from_prompt_file(path: Path, output_len: int, num_prompts: int | None = None) -> list[LoadRequest]:
    """Read JSONL lines `{"prompt": text or token ids, "max_tokens": optional}`.

    Raises ValueError that names the malformed line.
    """
    requests: list[LoadRequest] = []
    decoder = msgspec.json.Decoder(PromptLine)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        if len(requests) == num_prompts:
            break
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        requests.append(LoadRequest(entry.prompt, entry.max_tokens or output_len))
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrival times in seconds of `count` requests at a mean `rate` per second.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier. An
    infinite rate sends everything at once.
    """
    if not rate > 0:
        raise ValueError(f"--request-rate must be above 0, got {rate}")
    if not 0 < burstiness < np.inf:
        raise ValueError(f"--burstiness must be above 0 and finite, got {burstiness}")
    if np.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), size=count)
    gaps[0] = 0.0
    return np.cumsum(gaps).tolist()


def with_arrivals(
    requests: Sequence[LoadRequest], rate: float, burstiness: float, seed: int
) -> list[LoadRequest]:
    """Return the same requests with the arrival times of a random process of the given rate."""
    times = arrivals(len(requests), rate, burstiness, seed)
    return [LoadRequest(r.prompt, r.output_len, t) for r, t in zip(requests, times, strict=True)]


class _Blocks:
    """The tokens of each hash id; an id has the same tokens in every run with the same seed."""

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


def from_trace(lines: Sequence[TraceLine], fit: TraceFit, vocab_size: int, seed: int) -> list[LoadRequest]:
    """Turn trace lines into requests with token-id prompts and arrival times in seconds.

    The first request arrives at 0.
    """
    blocks = _Blocks(fit.block_tokens, vocab_size, seed)
    requests: list[LoadRequest] = []
    for request in fitted(lines, fit):
        prompt: list[int] = []
        for hash_id in request.hash_ids:
            if len(prompt) >= request.input_len:
                break
            prompt += blocks[hash_id]
        requests.append(LoadRequest(prompt[: request.input_len], request.output_len, request.arrival))
    return requests
