"""Every architecture gives Transformers' tokens, in fp32. Those with KV of their own kind do so through a
prefill and a decode worker: real processes, sockets and transfers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.transfer.certificates import Authority
from engine.engine import Engine
from engine.linear.packed import kernel_fault
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import ARCHITECTURES, HYBRIDS, VOCAB_SIZE, write_model
from tests.speculation.small_engine import run
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import assert_greedy, load

CHUNK = 50
"""The workers' `max_num_batched_tokens`, no multiple of a block: longer prompts are prefilled in chunks."""
LENGTHS = [1, 15, 16, 17, 49, 130]
NUM_TOKENS = 20
RESUMED = 7
"""Tokens that a resumed request has already: those from before a worker died."""
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
SMALL_POOL_BLOCKS = 24
"""Too few blocks for all sequences at their full length, so that some are preempted."""
NO_KERNEL = kernel_fault(torch.device("cpu"), torch.bfloat16)
CALLS_OTHERS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
recurrent = pytest.mark.skipif(CALLS_OTHERS, reason="this Transformers' recurrent layers differ")


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run_all(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, name: str, batch: list[list[int]]
) -> list[list[int]]:
    return resume(cluster, prefill, decode, name, batch, [[] for _ in batch])


def resume(
    cluster: Cluster,
    prefill: RunningWorker,
    decode: RunningWorker,
    name: str,
    batch: list[list[int]],
    known: list[list[int]],
    num_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    """Run requests that carry the tokens which another worker generated. Return the others."""
    ids = [f"{name}-{index}" for index in range(len(batch))]
    for request_id, prompt, tokens in zip(ids, batch, known, strict=True):
        resumed = request(request_id, prompt, num_tokens)
        resumed.output_token_ids.extend(tokens)
        cluster.generate(prefill, resumed, decode.address)
    cluster.run(*ids, timeout_s=60)
    for request_id, tokens in zip(ids, known, strict=True):
        if len(tokens) < num_tokens - 1:
            assert set(cluster.sources(request_id)) == {prefill.worker_id, decode.worker_id}
    return [cluster.tokens(request_id) for request_id in ids]


def check(model: Path, batch: list[list[int]], found: list[list[int]]) -> None:
    reference = load(model)
    for prompt, tokens in zip(batch, found, strict=True):
        assert_greedy(reference, prompt, tokens, NUM_TOKENS)
    assert len({token for tokens in found for token in tokens}) > NUM_TOKENS // 2, "a test that cannot fail"


MOVED = {
    "llama",
    "mistral",  # a window in all layers
    "gemma3_text",  # in some
    "gpt_oss",  # with sinks
    "mimo_v2_flash",  # of another width than the other layers
    "gemma3n_text",  # layers that share KV
    "gemma4_text",  # of several widths
    "deepseek_v3",  # latents
    "qwen3_next",  # states: gated delta nets,
    "kimi_linear",  # by channel, beside latents,
    "falcon_h1",  # Mamba2,
    "jamba",  # Mamba,
    "minimax",  # lightning attention,
    "lfm2",  # convolutions alone
}
"""The architectures whose KV and states differ from all others'."""


def architectures(*, moved: bool) -> list[Any]:
    found = [name for name in ARCHITECTURES | HYBRIDS if (name in MOVED) == moved]
    return [pytest.param(name, marks=recurrent) if name in HYBRIDS else name for name in found]


@pytest.mark.parametrize("model_type", architectures(moved=False))
def test_an_engine_gives_the_tokens_of_generate(model_type: str, tmp_path: Path) -> None:
    """In chunks and batches, and from cached prefixes."""
    write_model(model_type, tmp_path)
    batch = prompts(LENGTHS, seed=1)
    engine = Engine(tiny_config(tmp_path, max_num_batched_tokens=CHUNK, max_num_seqs=5))
    for name in ("first", "again"):
        asked = [request(f"{name}-{index}", prompt, NUM_TOKENS) for index, prompt in enumerate(batch)]
        found = run(engine, asked)
        check(tmp_path, batch, [found[each.request_id].token_ids for each in asked])
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("model_type", architectures(moved=True))
def test_tokens_equal_generate(model_type: str, tmp_path: Path) -> None:
    """DeepSeek also drafts. Recurrent models resume requests, others use cached prefixes."""
    write_model(model_type, tmp_path)
    batch = prompts(LENGTHS, seed=1)
    drafts = DRAFTS if model_type == "deepseek_v3" else None
    options: dict[str, Any] = {
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 5,
        "speculative_config": drafts,
    }
    with Cluster() as cluster:
        prefill, decode = cluster.start_pair(tiny_config(tmp_path, **options))
        first = run_all(cluster, prefill, decode, "first", batch)
        check(tmp_path, batch, first)
        outputs = [output for parts in cluster.outputs.values() for _, output in parts]
        assert any(output.drafted_tokens for output in outputs) == (drafts is not None)
        cluster.wait_empty(prefill, decode)
        hits = prefill.state.prefix_hit_tokens
        known = [tokens[: RESUMED if model_type in HYBRIDS else 0] for tokens in first]
        rest = resume(cluster, prefill, decode, "again", batch, known)
        assert [before + after for before, after in zip(known, rest, strict=True)] == first
        cluster.wait_empty(prefill, decode)
        assert prefill.state.prefix_hit_tokens > hits
        assert decode.state.prefix_hit_tokens > 0


@recurrent
@pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "kimi_linear"])
def test_native_layers_give_the_tokens_of_a_lone_engine(model_type: str, tmp_path: Path) -> None:
    """bfloat16: in a batch, after prefix hits, resumed, and with drafts of which some are wrong."""
    write_model(model_type, tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": "auto"}
    lone = Engine(tiny_config(tmp_path, enable_prefix_caching=False, **options))
    assert lone.start_up["forward"] == "native decoder"
    batch = prompts(LENGTHS, seed=1)
    expected = [run(lone, [request("", prompt, NUM_TOKENS)])[""].token_ids for prompt in batch]
    drafts = SpeculativeConfig(method="self_speculative", num_speculative_tokens=4)
    limits = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 5}
    with Cluster() as cluster:
        config = tiny_config(tmp_path, speculative_config=drafts, **limits, **options)
        prefill, decode = cluster.start_pair(config)
        for name in ("first", "after prefix hits"):
            assert run_all(cluster, prefill, decode, name, batch) == expected
        known = [tokens[:RESUMED] for tokens in expected]
        rest = resume(cluster, prefill, decode, "resumed", batch, known)
        assert rest == [tokens[RESUMED:] for tokens in expected]
        outputs = [output for parts in cluster.outputs.values() for _, output in parts]
        accepted, drafted = (
            sum(getattr(output, name) for output in outputs) for name in ("accepted_tokens", "drafted_tokens")
        )
        assert 0 < accepted < drafted
        cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize("crowd", ["sixteen", "preempted"])
def test_requests_at_once(tmp_path: Path, crowd: str) -> None:
    """The small pool's worker is slow, so that all requests arrive before the first one ends."""
    write_model("llama", tmp_path)
    lengths = [5 + 11 * index for index in range(16)] if crowd == "sixteen" else [30] * 10
    batch = prompts(lengths, seed=2)
    pool_bytes = SMALL_POOL_BLOCKS * 3 * 2 * 16 * 2 * 16 * 4
    config = tiny_config(tmp_path, max_model_len=256)
    small = tiny_config(tmp_path, max_model_len=128, kv_cache_memory_bytes=pool_bytes)
    with Cluster() as cluster:
        prefill = cluster.start("prefill", "prefill-0", config)
        tight = (small, "slow:0.02") if crowd == "preempted" else (config,)
        decode = cluster.start("decode", "decode-0", *tight)
        check(tmp_path, batch, run_all(cluster, prefill, decode, "crowd", batch))
        cluster.wait_empty(prefill, decode)
        assert (decode.state.num_preemptions > 0) == (crowd == "preempted")


def test_tls_and_kv_that_is_not_paged(tmp_path: Path) -> None:
    """Without paged KV, whole requests get the same tokens, too."""
    files = Authority(tmp_path / "tls").issue("worker")
    model = tmp_path / "model"
    write_model("llama", model)
    batch = prompts([1, 16, 100, 200], seed=1)
    tls = {"kv_tls_cert": files.cert, "kv_tls_key": files.key, "kv_tls_ca": files.ca}
    config = tiny_config(model, kv_transports="tcp", paged_kv=False, **tls)
    with Cluster() as cluster:
        prefill, decode = cluster.start_pair(config)
        split = run_all(cluster, prefill, decode, "split", batch)
        check(model, batch, split)
        for index, prompt in enumerate(batch):
            cluster.generate(decode, request(f"whole-{index}", prompt, NUM_TOKENS))
        cluster.run(*(f"whole-{index}" for index in range(len(batch))))
        assert [cluster.tokens(f"whole-{index}") for index in range(len(batch))] == split
        cluster.wait_empty(prefill, decode)
        assert prefill.state.transports == {"decode-0": "tcp"}
        (pair,) = prefill.state.pairs
        assert (pair.peer, pair.transport) == ("decode-0", "tcp")
        assert pair.counters["kv_transfer_pieces_total"] >= len(batch)
