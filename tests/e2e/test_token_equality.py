"""Every architecture gives the tokens of `transformers.generate`, through a prefill and a decode worker.

One model with latent attention also drafts. fp32, greedy, real processes, sockets and transfers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import ARCHITECTURES, VOCAB_SIZE, write_model
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import greedy, load

CHUNK = 64
"""The workers' `max_num_batched_tokens`, so longer prompts are prefilled in chunks."""

LENGTHS = [1, 7, 16, 31, 48, CHUNK, 100, 3 * CHUNK]
NUM_TOKENS = 20
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
SMALL_POOL_BLOCKS = 24
"""Too few blocks for all sequences at their full length, so that some are preempted."""


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run_all(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, name: str, batch: list[list[int]]
) -> list[list[int]]:
    ids = [f"{name}-{index}" for index in range(len(batch))]
    for request_id, prompt in zip(ids, batch, strict=True):
        cluster.generate(prefill, request(request_id, prompt, NUM_TOKENS), decode.address)
    cluster.run(*ids, timeout_s=60)
    for request_id in ids:
        assert set(cluster.sources(request_id)) == {"prefill-0", "decode-0"}
    return [cluster.tokens(request_id) for request_id in ids]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_equal_generate(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    reference = load(tmp_path)
    batch = prompts(LENGTHS, seed=1)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    assert len({token for tokens in expected for token in tokens}) > NUM_TOKENS // 2, (
        "a test that cannot fail"
    )
    with Cluster() as cluster:
        drafts = DRAFTS if model_type == "deepseek_v3" else None
        prefill, decode = cluster.start_pair(tiny_config(tmp_path, speculative_config=drafts))
        assert run_all(cluster, prefill, decode, "first", batch) == expected
        outputs = [output for parts in cluster.outputs.values() for _, output in parts]
        assert any(output.drafted_tokens for output in outputs) == (drafts is not None)
        # Again, with the prompts in both workers' prefix caches.
        hits = prefill.state.prefix_hit_tokens
        assert run_all(cluster, prefill, decode, "again", batch) == expected
        cluster.wait_empty(prefill, decode)
        assert prefill.state.prefix_hit_tokens > hits
        assert decode.state.prefix_hit_tokens > 0


def test_sixteen_requests_at_once(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    reference = load(tmp_path)
    batch = prompts([5 + 11 * index for index in range(16)], seed=2)
    with Cluster() as cluster:
        prefill, decode = cluster.start_pair(tiny_config(tmp_path))
        tokens = run_all(cluster, prefill, decode, "crowd", batch)
        assert tokens == [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
        cluster.wait_empty(prefill, decode)


def test_preempted_sequences_continue_with_the_same_tokens(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    reference = load(tmp_path)
    batch = prompts([30] * 10, seed=3)
    block_bytes = 3 * 2 * 16 * 2 * 16 * 4
    config = tiny_config(tmp_path, max_model_len=128)
    small = tiny_config(tmp_path, max_model_len=128, kv_cache_memory_bytes=SMALL_POOL_BLOCKS * block_bytes)
    with Cluster() as cluster:
        prefill = cluster.start("prefill", "prefill-0", config)
        # so that all requests arrive at once
        decode = cluster.start("decode", "decode-0", small, "slow:0.02")
        tokens = run_all(cluster, prefill, decode, "crowd", batch)
        assert tokens == [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
        cluster.wait_empty(prefill, decode)
        assert decode.state.num_preemptions > 0
