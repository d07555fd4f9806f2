"""Requests that replay a trace: prompts of token ids which share the prefixes that the recorded prompts
shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.serve.workload import LoadRequest, random_tokens
from planner.trace import TraceFit, TraceLine, fitted


class _Blocks:
    """The tokens for each hash id; the same id gives the same tokens in every run with the same seed."""

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


def to_requests(lines: Sequence[TraceLine], fit: TraceFit, vocab_size: int, seed: int) -> list[LoadRequest]:
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
