"""Models with sliding windows in all or some layers, on real workers: transfers carry only the window's
blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.kv_events import Window
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import SLIDING_WINDOW, write_model
from tests.e2e.test_token_equality import prompts
from tests.worker.harness import Cluster, request, tiny_config
from tests.worker.tiny_model import greedy, load

CHUNK = 50
NUM_TOKENS = 90
LAYER_BYTES = 2 * 16 * 2 * 16 * 4
"""A layer's KV bytes of a block."""


def num_moved(model: str, num_tokens: int) -> int:
    """Return how many blocks move. In the mixed model one layer of three is full, and each layer has its own
    table.
    """
    num_blocks = -(-num_tokens // 16)
    within = num_blocks - Window(SLIDING_WINDOW, 16).first_place(num_tokens)
    return within if model == "mistral" else num_blocks + 2 * within


@pytest.mark.parametrize(
    ("model", "transport"), [("mistral", "shm"), ("mistral", "tcp"), ("gemma3_text", "tcp")]
)
def test_a_conversation_moves_to_another_worker(tmp_path: Path, model: str, transport: str) -> None:
    write_model(model, tmp_path)
    reference = load(tmp_path)
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK, kv_transports=transport)
        prefill, decode = cluster.start_pair(config)
        fresh = cluster.start("prefill", "prefill-1", config)
        [first, added] = prompts([230, 11], seed=3)
        cluster.generate(prefill, request("turn 1", first, NUM_TOKENS), decode.address)
        cluster.run("turn 1")
        assert prefill.counter("kv_blocks_pushed_total") == num_moved(model, 230)
        second = first + cluster.tokens("turn 1") + added
        cluster.generate(fresh, request("turn 2", second, NUM_TOKENS), decode.address, prefix=decode.address)
        cluster.run("turn 2")
        for name, prompt in (("turn 1", first), ("turn 2", second)):
            assert cluster.tokens(name) == greedy(reference, prompt, NUM_TOKENS)
        cluster.wait_empty(prefill, decode, fresh)
        held = (len(second) - len(added) - 1) // 16 * 16
        assert cluster.outputs["turn 2"][0][1].cached_tokens == held
        counts = fresh.counter("prefix_blocks_fetched_total"), decode.counter("prefix_blocks_lent_total")
        assert counts == (num_moved(model, held),) * 2


@pytest.mark.parametrize("model", ["mistral", "gpt_oss"])
def test_answers_continue_when_the_decode_worker_dies(tmp_path: Path, model: str) -> None:
    """With drafts, and preempted in a pool too small for all. The draft model's KV shares the full layers'
    blocks.
    """
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
    if model == "gpt_oss":
        write_model("llama", tmp_path / "draft", num_hidden_layers=1)
        speculative = SpeculativeConfig(
            method="draft_model", model=str(tmp_path / "draft"), num_speculative_tokens=4
        )
    write_model(model, tmp_path / "model", num_hidden_layers=4 if model == "gpt_oss" else 3)
    reference = load(tmp_path / "model")
    pattern = prompts([12], seed=5)[0]
    batch = [*prompts([15, 120, 230], seed=2), pattern * 9, pattern * 3]
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    with Cluster() as cluster:
        config = tiny_config(
            tmp_path / "model",
            max_num_batched_tokens=CHUNK,
            speculative_config=speculative,
            max_model_len=400,
            kv_cache_memory_bytes=(26 if model == "mistral" else 46) * 3 * LAYER_BYTES,
            kv_transports="tcp",
        )
        prefill = cluster.start("prefill", "prefill-0", config)
        dying = cluster.start("decode", "decode-0", config, "slow:0.05")
        ids = [f"first-{index}" for index in range(len(batch))]
        for request_id, prompt in zip(ids, batch, strict=True):
            cluster.generate(prefill, request(request_id, prompt, NUM_TOKENS), dying.address)
        cluster.wait(lambda: sum(len(cluster.outputs[request_id]) > 3 for request_id in ids) > 2)
        dying.kill()
        other = cluster.start("decode", "decode-1", config)
        known = [
            [token for _, output in cluster.outputs[request_id] for token in output.token_ids]
            for request_id in ids
        ]
        cluster.abort(*ids)  # the router aborts them at the prefill worker, too
        again = [f"again-{request_id}" for request_id in ids]
        for request_id, prompt, tokens in zip(again, batch, known, strict=True):
            resumed = request(request_id, prompt, NUM_TOKENS)
            resumed.output_token_ids.extend(tokens)
            cluster.generate(prefill, resumed, other.address)
        cluster.run(*again, timeout_s=60)
        for request_id, tokens, whole in zip(again, known, expected, strict=True):
            assert tokens + cluster.tokens(request_id) == whole
        cluster.wait_empty(prefill, other)
        assert any(output.drafted_tokens for parts in cluster.outputs.values() for _, output in parts)
        windows = (SLIDING_WINDOW,) if model == "mistral" else (0, SLIDING_WINDOW)
        assert other.state.costs.kv_windows == windows
