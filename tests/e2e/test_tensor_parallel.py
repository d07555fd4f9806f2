"""Workers of several ranks give the tokens of others: hand-offs both ways, speculation, lost ranks. fp32."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import prompt, write_model
from tests.e2e.serving import HttpServing
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import assert_greedy

NUM_TOKENS = 16
ENDED_S = 10.0
TWO = {"prefill_tensor_parallel_size": 2, "decode_tensor_parallel_size": 2}


def other_ranks(worker: RunningWorker) -> list[psutil.Process]:
    return psutil.Process(worker.process.pid).children()


def test_hand_offs_between_different_sizes(folder: Path, reference: PreTrainedModel) -> None:
    prompts = [prompt(length) for length in (5, 48, 130)]
    options = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)
    one = tiny_config(folder, speculative_config=options)
    two = replace(one, **TWO)
    with Cluster() as cluster:
        small, large = (cluster._launch("prefill", f"prefill-{i}", each) for i, each in enumerate((one, two)))
        alone, ranks = (cluster._launch("decode", f"decode-{i}", each) for i, each in enumerate((one, two)))
        for worker in (small, large, alone, ranks):
            cluster._await(worker)
        assert [len(other_ranks(worker)) for worker in (small, large, alone, ranks)] == [0, 1, 0, 1]
        for name, prefill, decode in (("up", small, ranks), ("down", large, alone), ("same", large, ranks)):
            ids = [f"{name}-{index}" for index in range(len(prompts))]
            for request_id, each in zip(ids, prompts, strict=True):
                cluster.generate(prefill, request(request_id, each, NUM_TOKENS), decode.address)
            cluster.run(*ids)
            for request_id, each in zip(ids, prompts, strict=True):
                assert_greedy(reference, each, cluster.tokens(request_id), NUM_TOKENS)
            assert set(cluster.sources(ids[-1])) == {prefill.worker_id, decode.worker_id}
            last = [output for worker, output in cluster.outputs[ids[-1]] if worker == decode.worker_id]
            assert sum(output.accepted_tokens for output in last) > NUM_TOKENS // 2
        cluster.wait_empty(small, large, alone, ranks)
        left = other_ranks(large) + other_ranks(ranks)
    assert not psutil.wait_procs(left, ENDED_S)[1], "ranks end with their worker"


@pytest.mark.parametrize("fault", ["", "gloo"])
def test_states_are_handed_over_between_different_sizes(tmp_path: Path, fault: str) -> None:
    write_model("qwen3_5_text", tmp_path)
    prompts = [prompt(length) for length in (5, 48, 130)]
    one = tiny_config(tmp_path)
    two = replace(one, **TWO)
    with Cluster() as cluster:
        prefill = [
            cluster._launch("prefill", f"prefill-{i}", each, fault) for i, each in enumerate((one, two))
        ]
        decode = [cluster._launch("decode", f"decode-{i}", each, fault) for i, each in enumerate((one, two))]
        for worker in (*prefill, *decode):
            cluster._await(worker)
        found = []
        for sender, receiver in ((0, 0), (0, 1), (1, 0), (1, 1)):
            ids = [f"{sender}-{receiver}-{index}" for index in range(len(prompts))]
            for request_id, each in zip(ids, prompts, strict=True):
                asked = request(request_id, each, NUM_TOKENS)
                cluster.generate(prefill[sender], asked, decode[receiver].address)
            cluster.run(*ids)
            found.append([cluster.tokens(request_id) for request_id in ids])
            assert set(cluster.sources(ids[-1])) == {prefill[sender].worker_id, decode[receiver].worker_id}
        assert found[1:] == found[:1] * 3
        cluster.wait_empty(*prefill, *decode)


def test_hand_offs_between_ranks_with_pools_of_their_own(folder: Path, reference: PreTrainedModel) -> None:
    """Blocks are joined from ranks' heads, and divided among others, with a draft's KV on rank 0 alone."""
    prompts = [prompt(length) for length in (5, 48, 130)]
    options = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)

    def config(size: int) -> ServeConfig:
        sizes = {"prefill_tensor_parallel_size": size, "decode_tensor_parallel_size": size}
        return tiny_config(folder, speculative_config=options, **sizes)

    with Cluster() as cluster:
        prefill = {
            size: cluster._launch("prefill", f"prefill-{size}", config(size), "gloo") for size in (1, 2, 4)
        }
        decode = {size: cluster._launch("decode", f"decode-{size}", config(size), "gloo") for size in (1, 2)}
        for worker in (*prefill.values(), *decode.values()):
            cluster._await(worker)
        for sender, receiver in ((1, 2), (2, 1), (4, 2)):
            ids = [f"{sender}-{receiver}-{index}" for index in range(len(prompts))]
            for request_id, each in zip(ids, prompts, strict=True):
                asked = request(request_id, each, NUM_TOKENS)
                cluster.generate(prefill[sender], asked, decode[receiver].address)
            cluster.run(*ids)
            for request_id, each in zip(ids, prompts, strict=True):
                assert_greedy(reference, each, cluster.tokens(request_id), NUM_TOKENS)
            name = decode[receiver].worker_id
            assert set(cluster.sources(ids[-1])) == {prefill[sender].worker_id, name}
            last = [output for worker, output in cluster.outputs[ids[-1]] if worker == name]
            assert sum(output.accepted_tokens for output in last) > NUM_TOKENS // 2
        cluster.wait_empty(*prefill.values(), *decode.values())


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[HttpServing]:
    workers = {"prefill-0": "", "decode-0": "slow:0.02", "decode-1": "slow:0.02", "decode-2": "slow:0.02"}
    with HttpServing(folder, workers, decode_tensor_parallel_size=2, decode_replicas=3) as serving:
        yield serving


def kill_rank(worker: RunningWorker) -> None:
    os.kill(other_ranks(worker)[0].pid, signal.SIGKILL)


def kill_worker(worker: RunningWorker) -> None:
    worker.process.kill()


@pytest.mark.parametrize("kill", [kill_rank, kill_worker])
def test_a_lost_rank_is_a_lost_worker(
    kill: Callable[[RunningWorker], None], serving: HttpServing, reference: PreTrainedModel
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(serving.tokens, prompt(40), 60)
        worker_id = running(serving)
        worker = serving.workers[worker_id]
        left = other_ranks(worker)
        kill(worker)
        assert not psutil.wait_procs(left, ENDED_S)[1]
        serving.bury(worker_id)
        assert_greedy(reference, prompt(40), answer.result(), 60)
    assert serving.metric("tandem_requests_placed_again_total") > 0


def running(serving: HttpServing) -> str:
    """Return the decode worker that runs the request."""
    found: list[str] = []

    def look() -> bool:
        states = serving.worker_states()
        found[:] = [name for name in states if name.startswith("decode") and states[name]["num_running"]]
        return bool(found)

    serving.wait(look)
    return found[0]
