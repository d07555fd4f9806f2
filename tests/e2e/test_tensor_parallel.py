"""Workers of several ranks give the tokens of others: hand-offs both ways, speculation, lost ranks. fp32."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

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
ENDED_S = 30.0
PROMPTS = [prompt(length) for length in (5, 48, 130)]
Pairs = Sequence[tuple[int, int]]
"""Numbers of ranks of prefill and decode workers that serve together."""


def other_ranks(worker: RunningWorker) -> list[psutil.Process]:
    return psutil.Process(worker.process.pid).children()


class Sized:
    """Prefill and decode workers by their number of ranks, of all sizes in `pairs`."""

    def __init__(self, cluster: Cluster, config: ServeConfig, pairs: Pairs, fault: str) -> None:
        self._cluster = cluster
        self.prefill, self.decode = (
            {size: self._launch(role, config, size, fault) for size in sorted(set(sizes))}
            for role, sizes in zip(("prefill", "decode"), zip(*pairs, strict=True), strict=True)
        )
        self.workers = [*self.prefill.values(), *self.decode.values()]
        for worker in self.workers:
            cluster._await(worker)
        sizes = [*self.prefill, *self.decode]
        assert [len(other_ranks(worker)) + 1 for worker in self.workers] == sizes

    def _launch(self, role: Any, config: ServeConfig, size: int, fault: str) -> RunningWorker:
        sized = replace(config, prefill_tensor_parallel_size=size, decode_tensor_parallel_size=size)
        return self._cluster._launch(role, f"{role}-{size}", sized, fault)

    def hand_over(self, sender: int, receiver: int) -> tuple[list[list[int]], int]:
        """Return all prompts' tokens, and how many drafted ones the last one's decode worker took."""
        cluster, prefill, decode = self._cluster, self.prefill[sender], self.decode[receiver]
        ids = [f"{sender}-{receiver}-{index}" for index in range(len(PROMPTS))]
        for request_id, each in zip(ids, PROMPTS, strict=True):
            cluster.generate(prefill, request(request_id, each, NUM_TOKENS), decode.address)
        cluster.run(*ids)
        assert set(cluster.sources(ids[-1])) == {prefill.worker_id, decode.worker_id}
        last = [output for worker, output in cluster.outputs[ids[-1]] if worker == decode.worker_id]
        return [cluster.tokens(each) for each in ids], sum(output.accepted_tokens for output in last)


@pytest.mark.parametrize(
    ("fault", "pairs"), [("", ((1, 2), (2, 1), (2, 2))), ("gloo", ((1, 2), (2, 1), (4, 2)))]
)
def test_hand_offs_between_different_sizes(
    folder: Path, reference: PreTrainedModel, fault: str, pairs: Pairs
) -> None:
    """With pools of their own, ranks' blocks are joined and divided, with a draft's KV on rank 0 alone."""
    options = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)
    with Cluster() as cluster:
        sized = Sized(cluster, tiny_config(folder, speculative_config=options), pairs, fault)
        for pair in pairs:
            found, num_accepted = sized.hand_over(*pair)
            for each, tokens in zip(PROMPTS, found, strict=True):
                assert_greedy(reference, each, tokens, NUM_TOKENS)
            assert num_accepted > NUM_TOKENS // 2
        cluster.wait_empty(*sized.workers)
        left = [rank for worker in sized.workers for rank in other_ranks(worker)]
    assert not psutil.wait_procs(left, ENDED_S)[1], "ranks end with their worker"


@pytest.mark.parametrize("fault", ["", "gloo"])
def test_states_are_handed_over_between_different_sizes(tmp_path: Path, fault: str) -> None:
    write_model("qwen3_5_text", tmp_path)
    pairs = ((1, 1), (1, 2), (2, 1), (2, 2))
    with Cluster() as cluster:
        sized = Sized(cluster, tiny_config(tmp_path), pairs, fault)
        found = [sized.hand_over(*pair)[0] for pair in pairs]
        assert found[1:] == found[:1] * 3
        cluster.wait_empty(*sized.workers)


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
