"""Conversations that move between workers, with windows or recurrent state, by prefix fetches or by cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from protocol.kv_events import Window
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import SLIDING_WINDOW, prompt, write_model
from tests.e2e.serving import HttpServing
from tests.e2e.test_token_equality import CHUNK, prompts, recurrent, resume
from tests.speculation.small_engine import write_noisy
from tests.worker.harness import Cluster, request, tiny_config
from tests.worker.tiny_model import assert_greedy, load

NUM_TOKENS = 60
LAYER_BYTES = 2 * 16 * 2 * 16 * 4
"""A layer's KV bytes of a block."""


def num_moved(model: str, num_tokens: int) -> int:
    """Return how many blocks move. In the mixed model one layer of three is full, and each layer has its own
    table.
    """
    num_blocks = -(-num_tokens // 16)
    within = num_blocks - Window(SLIDING_WINDOW, 16).first_place(num_tokens)
    return within if model == "mistral" else num_blocks + 2 * within


@pytest.mark.parametrize(("model", "transport"), [("mistral", "shm"), ("gemma3_text", "tcp")])
def test_a_conversation_moves_to_another_worker(tmp_path: Path, model: str, transport: str) -> None:
    write_model(model, tmp_path)
    reference = load(tmp_path)
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK, kv_transports=transport)
        prefill, decode = cluster.start_pair(config)
        fresh = cluster.start("prefill", "prefill-1", config)
        [first, added] = prompts([130, 11], seed=3)
        cluster.serve(prefill, request("turn 1", first, NUM_TOKENS), decode=decode.address)
        assert prefill.counter("kv_blocks_pushed_total") == num_moved(model, 130)
        second = first + cluster.tokens("turn 1") + added
        cluster.generate(fresh, request("turn 2", second, NUM_TOKENS), decode.address, prefix=decode.address)
        cluster.run("turn 2")
        for name, prompt in (("turn 1", first), ("turn 2", second)):
            assert_greedy(reference, prompt, cluster.tokens(name), NUM_TOKENS)
        cluster.wait_empty(prefill, decode, fresh)
        held = (len(second) - len(added) - 1) // 16 * 16
        assert cluster.outputs["turn 2"][0][1].cached_tokens == held
        counts = fresh.counter("prefix_blocks_fetched_total"), decode.counter("prefix_blocks_lent_total")
        assert counts == (num_moved(model, held),) * 2


@recurrent
def test_a_conversation_moves_to_another_worker_with_its_state(tmp_path: Path) -> None:
    write_model("qwen3_next", tmp_path)
    reference = load(tmp_path)
    with Cluster() as cluster:
        config = tiny_config(tmp_path, max_num_batched_tokens=CHUNK)
        prefill, decode = cluster.start_pair(config)
        fresh = cluster.start("prefill", "prefill-1", config)
        [first, added] = prompts([70, 11], seed=3)
        cluster.serve(prefill, request("turn 1", first, 30), decode=decode.address)
        second = first + cluster.tokens("turn 1") + added
        for number, prefix in enumerate([decode.address, None, prefill.address]):
            cluster.serve(fresh, request(f"{number}", second, 20), decode=decode.address, prefix=prefix)
            assert_greedy(reference, second, cluster.tokens(f"{number}"), 20)
        cluster.wait_empty(prefill, decode, fresh)
        # An answer's last token has no KV, and a prompt's last token is always computed.
        found = [cluster.outputs[f"{number}"][0][1].cached_tokens for number in range(3)]
        assert found == [96, 96, 96]
        assert fresh.counter("prefix_blocks_fetched_total") == decode.counter("prefix_blocks_lent_total") == 6
        assert prefill.counter("prefix_blocks_lent_total") == 0
        assert fresh.counter("kv_blocks_skipped_total") > 0


def drafting(model: str, folder: Path) -> SpeculativeConfig:
    """gpt-oss has a draft model in the full layers' blocks, Qwen3-Next one with recurrent layers."""
    if model == "mistral":
        return SpeculativeConfig(method="ngram", num_speculative_tokens=8)
    draft = folder / "draft"
    if model == "gpt_oss":
        write_model("llama", draft, num_hidden_layers=1)
        return SpeculativeConfig(method="draft_model", model=str(draft), num_speculative_tokens=4)
    write_noisy(folder / "model", draft)
    tree: dict[str, Any] = {"num_speculative_tokens": 9, "max_speculative_tokens": 4, "tree": True}
    return SpeculativeConfig(method="draft_model", model=str(draft), **tree)


@pytest.mark.parametrize("model", ["mistral", "gpt_oss", pytest.param("qwen3_next", marks=recurrent)])
def test_answers_continue_when_the_decode_worker_dies(tmp_path: Path, model: str) -> None:
    """With drafts. Models with windows are also preempted, in a pool too small for all."""
    write_model(model, tmp_path / "model", **({"num_hidden_layers": 4} if model == "gpt_oss" else {}))
    reference = load(tmp_path / "model")
    blocks = {"mistral": 26, "gpt_oss": 46, "qwen3_next": 341}[model]
    config = tiny_config(
        tmp_path / "model",
        max_num_batched_tokens=CHUNK,
        max_num_seqs=5,
        speculative_config=drafting(model, tmp_path),
        max_model_len=400,
        kv_cache_memory_bytes=blocks * 3 * LAYER_BYTES,
        kv_transports="tcp",
    )
    pattern = prompts([12], seed=5)[0]
    batch = [*prompts([15, 120, 230], seed=2), pattern * 9, pattern * 3]
    ids = [f"first-{index}" for index in range(len(batch))]
    with Cluster() as cluster:
        prefill = cluster.start("prefill", "prefill-0", config)
        dying = cluster.start("decode", "decode-0", config, "slow:0.05")
        for request_id, prompt in zip(ids, batch, strict=True):
            cluster.generate(prefill, request(request_id, prompt, NUM_TOKENS), dying.address)
        cluster.wait(lambda: sum(len(cluster.outputs[request_id]) > 3 for request_id in ids) > 2)
        dying.kill()
        other = cluster.start("decode", "decode-1", config)
        outputs = [[output for _, output in cluster.outputs[request_id]] for request_id in ids]
        known = [[token for output in parts for token in output.token_ids] for parts in outputs]
        assert sum(0 < len(tokens) < NUM_TOKENS for tokens in known) > 2
        cluster.abort(*ids)  # the router aborts them at the prefill worker, too
        unfinished = [index for index, tokens in enumerate(known) if len(tokens) < NUM_TOKENS]
        batch, known = ([each[index] for index in unfinished] for each in (batch, known))
        rest = resume(cluster, prefill, other, "again", batch, known, NUM_TOKENS)
        for prompt, before, after in zip(batch, known, rest, strict=True):
            assert_greedy(reference, prompt, before + after, NUM_TOKENS)
        cluster.wait_empty(prefill, other)
        found = [output for parts in cluster.outputs.values() for _, output in parts]
        assert any(output.accepted_tokens for output in found) or model == "mistral"
        assert any(output.drafted_tokens for output in found)
        windows = {"mistral": (SLIDING_WINDOW,), "gpt_oss": (0, SLIDING_WINDOW)}
        assert other.state.costs.kv_windows == windows.get(model, other.state.costs.kv_windows)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder, {"prefill-0": "", "prefill-1": "", "decode-0": ""}) as serving:
        yield serving


def test_links_are_made_before_the_first_request(serving: HttpServing) -> None:
    def connected() -> bool:
        states = serving.worker_states()
        return all(states[f"prefill-{n}"]["transports"].get("decode-0") == "shm" for n in (0, 1))

    serving.wait(connected)
    assert serving.metric("tandem_placements_total") == 0


def test_the_second_turn_fetches_the_first_answer_from_its_decode_worker(
    serving: HttpServing, reference: PreTrainedModel
) -> None:
    first = prompt(40, seed=1)
    conversation = first + serving.tokens(first, 200)
    second = conversation + prompt(50, seed=2)
    assert_greedy(reference, second, serving.tokens(second, 12), 12)
    serving.wait_empty()
    fetched = sum(serving.counter(f"prefill-{n}", "prefix_blocks_fetched_total") for n in (0, 1))
    lent = serving.counter("decode-0", "prefix_blocks_lent_total")
    assert fetched == lent >= 200 // 16 - 1


def test_requests_placed_by_cost_give_the_same_tokens(folder: Path, reference: PreTrainedModel) -> None:
    rng = random.Random(0)
    prompts = [prompt(rng.choice((5, 60, 300)), seed) for seed in range(12)]
    with HttpServing(folder, placement="cost", itl_budget=0.002) as serving, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda prompt: serving.tokens(prompt, 20), prompts)
        for each, tokens in zip(prompts, answers, strict=True):
            assert_greedy(reference, each, tokens, 20)
        decisions = serving.http.get("/decisions").json()["decisions"]
        cluster = serving.http.get("/cluster").json()
        serving.wait_empty()
    assert len(decisions) == len(prompts)
    observed = [decision["observed"]["tpot_s"] for decision in decisions]
    assert min(observed) >= 0 < max(observed), "0: all tokens came at once, as after a pause of the router"
    costs = [worker["costs"] for worker in cluster["workers"]]
    assert all(each["kv_bytes"] > 0 for each in costs)
    assert any(each["step_s"] > 0 for each in costs), "a worker that got no request has taken no step"
