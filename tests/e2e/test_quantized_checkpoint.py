"""A published checkpoint with quantized weights: the same tokens split, colocated, alone and in a batch."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from tests.engine.quantization.quantized_model import VOCAB_SIZE, write_quantized
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config

NUM_TOKENS = 16
LENGTHS = [1, 7, 16, 40, 64, 100, 150]


def run(cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, ids: list[str]) -> list[list[int]]:
    """Split if the workers differ. A request's prompt and seed depend on the number after the last dash."""
    for request_id in ids:
        prompt, sampling = question(int(request_id.rpartition("-")[2]))
        target = decode.address if decode is not prefill else None
        cluster.generate(prefill, request(request_id, prompt, NUM_TOKENS, **sampling), target)
    cluster.run(*ids, timeout_s=60)
    return [cluster.tokens(request_id) for request_id in ids]


def question(number: int) -> tuple[list[int], dict[str, float]]:
    rng = random.Random(number)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(LENGTHS[number])]
    return prompt, {"temperature": 0.8, "seed": number} if number % 2 else {}


def test_an_awq_checkpoint_gives_the_same_tokens_however_it_is_served(tmp_path: Path) -> None:
    write_quantized(tmp_path, "qwen2", "awq", dtype=torch.float16)
    numbers = range(len(LENGTHS))
    config = tiny_config(tmp_path, dtype="auto", compile="auto", enable_prefix_caching=False)
    with Cluster() as cluster:
        prefill, decode = cluster.start_pair(config)
        batch = run(cluster, prefill, decode, [f"batch-{number}" for number in numbers])
        for number in numbers:
            assert run(cluster, prefill, decode, [f"alone-{number}"]) == [batch[number]]
            assert run(cluster, decode, decode, [f"colocated-{number}"]) == [batch[number]]
        assert len({token for tokens in batch for token in tokens}) > NUM_TOKENS, "a test that cannot fail"
        cluster.wait_empty(prefill, decode)
