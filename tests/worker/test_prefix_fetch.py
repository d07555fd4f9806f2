"""A worker fetches prefix blocks from another one's pool, with real workers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import greedy, prompt

PATIENT = "fetch:25"
"""The worker waits this many seconds for the next block, however busy the machine is."""


@pytest.fixture
def holder(cluster: Cluster, model_folder: Path) -> RunningWorker:
    """Start a prefill worker that has computed a prompt of 200 tokens."""
    worker = cluster.start("prefill", "prefill-1", tiny_config(model_folder))
    cluster.serve(worker, request("before", prompt(200), max_tokens=1))
    return worker


@pytest.fixture
def asking(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder))


def test_local_blocks_are_not_fetched(
    cluster: Cluster, model_folder: Path, holder: RunningWorker, reference: PreTrainedModel
) -> None:
    asking = cluster.start("prefill", "prefill-0", tiny_config(model_folder), PATIENT)
    cluster.serve(asking, request("half", prompt(200)[:100], max_tokens=1))
    cluster.serve(asking, request("r", prompt(200)), prefix=holder.address)
    cluster.serve(asking, request("again", prompt(200)), prefix=holder.address)
    for name in ("r", "again"):
        assert cluster.tokens(name) == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, asking)
    assert asking.counter("prefix_blocks_fetched_total") == 12 - 6
    assert asking.counter("prefix_fetches_total") == 1


def test_a_frozen_holder_that_wakes_up_late_changes_nothing(
    cluster: Cluster, holder: RunningWorker, asking: RunningWorker, reference: PreTrainedModel
) -> None:
    holder.signal(signal.SIGSTOP)
    try:
        cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
        cluster.run("r", timeout_s=20)
    finally:
        holder.signal(signal.SIGCONT)
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait(lambda: holder.state.counters.get("kv_leases_failed_total") == 1)
    cluster.wait_empty(holder, asking)
    cluster.serve(asking, request("next", prompt(200)[:150] + prompt(40, seed=9)))
    assert cluster.tokens("next") == greedy(reference, prompt(200)[:150] + prompt(40, seed=9), 12)
