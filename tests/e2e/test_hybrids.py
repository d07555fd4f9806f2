"""Models with recurrent layers give the tokens of `transformers.generate`: through a prefill and a decode
worker, and resumed after a death.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.engine import Engine
from engine.linear.packed import kernel_fault
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import HYBRIDS, write_model
from tests.e2e.test_token_equality import prompts, run_all
from tests.speculation.small_engine import run, write_noisy
from tests.worker.harness import Cluster, request, tiny_config
from tests.worker.tiny_model import greedy, load

CHUNK = 50
"""`max_num_batched_tokens`, which is no multiple of the state grid."""

LENGTHS = [1, 15, 16, 17, 49, 111]
NUM_TOKENS = 20
NO_KERNEL = kernel_fault(torch.device("cpu"), torch.bfloat16)

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers' recurrent layers call other functions",
)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_tokens_equal_generate(model_type: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    reference = load(tmp_path)
    batch = prompts(LENGTHS, seed=1)
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in batch]
    assert len({token for tokens in expected for token in tokens}) > NUM_TOKENS // 2, (
        "a test that cannot fail"
    )
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK, max_num_seqs=5)
        prefill, decode = cluster.start_pair(config)
        assert run_all(cluster, prefill, decode, "first", batch) == expected
        cluster.wait_empty(prefill, decode)
        # The request carries the tokens generated before a worker died.
        ids = [f"resumed-{index}" for index in range(len(batch))]
        for request_id, prompt, tokens in zip(ids, batch, expected, strict=True):
            resumed = request(request_id, prompt, NUM_TOKENS)
            resumed.output_token_ids.extend(tokens[:7])
            cluster.generate(prefill, resumed, decode.address)
        cluster.run(*ids, timeout_s=60)
        assert [cluster.tokens(request_id) for request_id in ids] == [tokens[7:] for tokens in expected]
        cluster.wait_empty(prefill, decode)


@pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "kimi_linear"])
def test_native_layers_give_the_tokens_of_a_lone_engine(model_type: str, tmp_path: Path) -> None:
    """In bfloat16: in chunks, in a batch, after prefix hits, resumed, and with drafts of which some are
    wrong.
    """
    write_model(model_type, tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": "auto"}
    lone = Engine(tiny_config(tmp_path, enable_prefix_caching=False, **options))
    assert lone.start_up["forward"] == "native decoder"
    batch = prompts(LENGTHS, seed=1)
    expected = [run(lone, [request("", prompt, NUM_TOKENS)])[""].token_ids for prompt in batch]
    drafts = SpeculativeConfig(method="self_speculative", num_speculative_tokens=4)
    with Cluster() as cluster:
        limits = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 5}
        config = tiny_config(tmp_path, speculative_config=drafts, **limits, **options)
        prefill, decode = cluster.start_pair(config)
        for name in ("first", "after prefix hits"):
            assert run_all(cluster, prefill, decode, name, batch) == expected
        for number, (prompt, tokens) in enumerate(zip(batch, expected, strict=True)):
            resumed = request(f"resumed-{number}", prompt, NUM_TOKENS)
            resumed.output_token_ids.extend(tokens[:7])
            cluster.generate(prefill, resumed, decode.address)
        ids = [f"resumed-{number}" for number in range(len(batch))]
        cluster.run(*ids, timeout_s=60)
        assert [cluster.tokens(request_id) for request_id in ids] == [tokens[7:] for tokens in expected]
        outputs = [output for parts in cluster.outputs.values() for _, output in parts]
        assert (
            0
            < sum(output.accepted_tokens for output in outputs)
            < sum(output.drafted_tokens for output in outputs)
        )
        cluster.wait_empty(prefill, decode)


def test_a_conversation_moves_to_another_worker_with_its_state(tmp_path: Path) -> None:
    write_model("qwen3_next", tmp_path)
    reference = load(tmp_path)
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK)
        prefill, decode = cluster.start_pair(config)
        fresh = cluster.start("prefill", "prefill-1", config)
        [first, added] = prompts([70, 11], seed=3)
        cluster.generate(prefill, request("turn 1", first, 30), decode.address)
        cluster.run("turn 1")
        second = first + cluster.tokens("turn 1") + added
        for number, prefix in enumerate([decode.address, None, prefill.address]):
            cluster.generate(fresh, request(f"{number}", second, NUM_TOKENS), decode.address, prefix=prefix)
            cluster.run(f"{number}")
            assert cluster.tokens(f"{number}") == greedy(reference, second, NUM_TOKENS)
        cluster.wait_empty(prefill, decode, fresh)
        # An answer's last token has no KV, and a prompt's last token is always computed.
        found = [cluster.outputs[f"{number}"][0][1].cached_tokens for number in range(3)]
        assert found == [96, 96, 96]
        assert fresh.counter("prefix_blocks_fetched_total") == decode.counter("prefix_blocks_lent_total") == 6
        assert prefill.counter("prefix_blocks_lent_total") == 0
        assert fresh.counter("kv_blocks_skipped_total") > 0


@pytest.mark.parametrize("drafts", [None, "chains", "trees"])
def test_answers_continue_when_the_decode_worker_dies(tmp_path: Path, drafts: str | None) -> None:
    """Also with drafts of a model that itself has recurrent layers."""
    model = tmp_path / "model"
    write_model("qwen3_next", model)
    write_noisy(model, tmp_path / "draft")
    reference = load(model)
    speculative = SpeculativeConfig(
        method="draft_model",
        model=str(tmp_path / "draft"),
        num_speculative_tokens=4 if drafts == "chains" else 9,
        max_speculative_tokens=4,
        tree=drafts == "trees",
    )
    num_tokens = 5 * NUM_TOKENS if drafts else NUM_TOKENS
    batch = prompts([15, 49, 64], seed=2)
    expected = [greedy(reference, prompt, num_tokens) for prompt in batch]
    with Cluster() as cluster:
        options: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 5}
        if drafts:
            options["speculative_config"] = speculative
        config = tiny_config(model, kv_transports="tcp", **options)
        prefill = cluster.start("prefill", "prefill-0", config)
        dying = cluster.start("decode", "decode-0", config, "slow:0.05")
        ids = [f"first-{index}" for index in range(len(batch))]
        for request_id, prompt in zip(ids, batch, strict=True):
            cluster.generate(prefill, request(request_id, prompt, num_tokens), dying.address)
        cluster.wait(lambda: all(len(cluster.outputs[request_id]) > 3 for request_id in ids))
        dying.kill()
        other = cluster.start("decode", "decode-1", config)
        known = [
            [token for _, output in cluster.outputs[request_id] for token in output.token_ids]
            for request_id in ids
        ]
        assert all(0 < len(tokens) < num_tokens for tokens in known)
        cluster.abort(*ids)  # the router aborts them at the prefill worker, too
        for request_id, prompt, tokens in zip(ids, batch, known, strict=True):
            resumed = request(f"again-{request_id}", prompt, num_tokens)
            resumed.output_token_ids.extend(tokens)
            cluster.generate(prefill, resumed, other.address)
        cluster.run(*(f"again-{request_id}" for request_id in ids), timeout_s=60)
        for request_id, tokens, whole in zip(ids, known, expected, strict=True):
            assert tokens + cluster.tokens(f"again-{request_id}") == whole
        outputs = [output for parts in cluster.outputs.values() for _, output in parts]
        assert any(output.accepted_tokens for output in outputs) == (drafts is not None)
