"""Engine faults, the end of the router, and the worker's own end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from protocol.config import ServeConfig
from protocol.kv_events import IDENTITY_BYTES
from protocol.roles import WorkerRange
from protocol.router_to_worker import CallRoll, Leave, PrepareToLeave
from protocol.speculation import SpeculativeConfig
from protocol.version import PROTOCOL
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from worker.setup import wires_of

PROMPT = [5, 6, 7, 8]


def test_a_worker_without_peers_opens_no_ucx() -> None:
    alone = ServeConfig(disaggregation=False)
    assert wires_of(alone) == ["shm", "cuda_ipc", "tcp"]
    assert wires_of(replace(alone, kv_transports="ucx")) == ["ucx"]
    scaled = replace(alone, autoscale={"decode": WorkerRange(1, 2)})
    for config in (ServeConfig(), replace(alone, ray_address="auto"), scaled):
        assert wires_of(config) == ["shm", "ucx", "cuda_ipc", "tcp"]


def test_a_failed_step_or_a_garbled_message_costs_only_its_requests(
    cluster: Cluster, model_folder: Path
) -> None:
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder), fault="fail:1")
    cluster.serve(worker, request("first", PROMPT))
    assert cluster.error("first").error_kind == "internal"
    cluster._socket.send_multipart([b"decode-0", b"\xc1 not msgpack"])
    cluster.serve(worker, request("second", PROMPT))
    assert len(cluster.tokens("second")) == 12
    cluster.wait_empty(worker)
    assert worker.counter("dropped_messages_total") == 1
    assert worker.counter("step_failures_total") == 1


def test_an_engine_that_keeps_failing_ends_the_worker(cluster: Cluster, model_folder: Path) -> None:
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder), fault="fail:100")
    names = ["a", "b", "c"]
    for name in names:
        cluster.serve(worker, request(name, PROMPT))
        assert cluster.error(name).error_kind == "internal"
    assert "BrokenEngineError" in worker.ended_with()


def test_a_draft_that_does_not_fit_ends_the_worker(
    cluster: Cluster, model_folder: Path, tmp_path: Path
) -> None:
    content = json.loads((model_folder / "config.json").read_text()) | {"vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps(content))
    speculative = SpeculativeConfig(method="draft_model", model=str(tmp_path))
    config = tiny_config(model_folder, load_format="dummy", speculative_config=speculative)
    with pytest.raises(
        AssertionError, match="ConfigError: --speculative-config: model: the draft's"
    ) as ended:
        cluster.start("decode", "decode-0", config)
    assert "vocabulary has 200 tokens, the model's 300" in str(ended.value)


def test_a_worker_reports_unknown_requests_after_all_its_outputs(
    cluster: Cluster, model_folder: Path
) -> None:
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder), fault="slow:0.1")
    cluster.generate(worker, request("runs", PROMPT, 30))
    cluster.wait(lambda: bool(cluster.outputs["runs"]))

    def call_roll(incarnation: str, *request_ids: str) -> None:
        cluster.send("decode-0", CallRoll(incarnation=incarnation, request_ids=list(request_ids)))

    call_roll("another", "runs", "unknown")
    cluster.generate(worker, request("refused", PROMPT, 10_000))
    call_roll(worker.address.incarnation, "runs", "refused", "unknown")
    cluster.wait(lambda: bool(cluster.absent))
    assert cluster.absent == ["refused", "unknown"]
    assert cluster.error("refused").error_kind == "invalid"
    cluster.run("runs")
    call_roll(worker.address.incarnation, "runs")
    cluster.wait(lambda: cluster.absent[2:] == ["runs"])


def test_a_worker_without_its_router_ends(model_folder: Path) -> None:
    cluster = Cluster()
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder))
    cluster.close()
    worker.join()


def test_a_missing_model_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--model"):
        cluster.start("decode", "decode-0", tiny_config(tmp_path))


def test_a_worker_ends_with_a_router_of_another_protocol(cluster: Cluster, model_folder: Path) -> None:
    cluster.protocol = PROTOCOL + 1
    worker = RunningWorker(cluster, "decode", "decode-0", tiny_config(model_folder))
    cluster.wait(lambda: "decode-0" in cluster.registered)
    spoken = rf"the worker .* speaks protocol {PROTOCOL}, the router .* {PROTOCOL + 1}"
    assert re.search(spoken, worker.ended_with())


def test_an_idle_worker_uses_no_cpu(cluster: Cluster, model_folder: Path) -> None:
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder))
    process = psutil.Process(worker.process.pid)

    def seconds() -> float:
        times = process.cpu_times()
        return times.user + times.system

    before, beats = seconds(), 0
    cluster.states.clear()
    while beats < 20:
        cluster.wait(lambda: worker.address.incarnation in cluster.states)
        cluster.states.clear()
        beats += 1
    assert seconds() - before < 0.25


def test_after_a_role_change_a_worker_reports_its_cache_again(cluster: Cluster, model_folder: Path) -> None:
    """As a new incarnation: with numbers from 0 on, before its first request."""
    worker = cluster.start("decode", "decode-0", tiny_config(model_folder))
    for index, name in enumerate("abc"):
        cluster.serve(worker, request(name, [index] * 40))
    before = worker.address.incarnation
    cluster.wait(lambda: len(cluster.kv_events[before]) > 1)
    cluster.send("decode-0", PrepareToLeave(incarnation=before, role="prefill", next_incarnation="f" * 16))
    cluster.send("decode-0", Leave(incarnation=before))
    cluster.wait(lambda: bool(cluster.kv_events["f" * 16]))
    first = cluster.kv_events["f" * 16][0]
    assert first.sequence == 0
    assert [change.kind for change in first.changes] == ["cleared", "stored"]
    told = len(first.changes[1].identities) // IDENTITY_BYTES
    cluster.refresh(worker)
    assert told == worker.state.cached_blocks > 3
    assert worker.state.num_kv_events == 1
