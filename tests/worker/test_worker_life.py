"""A worker's life: starts, faults, several routers, role changes and its end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from llguidance import LLTokenizer

from engine.load.loader import keep_preloaded
from engine.sampler import grammars
from models.bundled import bundled_path
from protocol.config import ServeConfig
from protocol.ids import new_request_id, router_of
from protocol.kv_events import IDENTITY_BYTES
from protocol.roles import WorkerRange
from protocol.router_to_worker import CallRoll, Leave, PrepareToLeave
from protocol.speculation import SpeculativeConfig
from protocol.version import PROTOCOL
from tests.worker.harness import ROUTER, Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import VOCAB_SIZE
from worker.link import RouterLeases, RouterLinks
from worker.setup import build_engine, preload_models, wires_of

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


OURS, THEIRS = f"{ROUTER}.ours", "second.theirs"
NUM_TOKENS = 60


def test_requests_of_a_lost_router_end_and_others_continue(model_folder: Path) -> None:
    config = tiny_config(model_folder, worker_timeout=0.3)
    prompt = random.Random(1).choices(range(1, VOCAB_SIZE), k=40)
    with Cluster() as first, Cluster(first.keys, "second") as second:
        first.endpoints.append(second.endpoint)
        worker = first.start("decode", "decode-0", config, "slow:0.02")
        second.wait(lambda: "decode-0" in second.registered)
        first.generate(worker, request(OURS, prompt, NUM_TOKENS))
        second.generate(worker, request(THEIRS, prompt, 200))
        second.wait(lambda: len(second.outputs[THEIRS]) > 3)
        assert not second.outputs[OURS]
        second.close()
        first.run(OURS)
        assert len(first.tokens(OURS)) == NUM_TOKENS
        assert not first.outputs[THEIRS]
        first.wait_empty(worker)
        assert worker.counter("orphaned_requests_total") == 1
        assert worker.state.num_running == 0


class Lines:
    """The connections of two routers, as `RouterLeases` sees them."""

    def __init__(self) -> None:
        self.first = SimpleNamespace(is_connected=True, router="first")
        self.second = SimpleNamespace(is_connected=True, router="second")
        self.leases = RouterLeases(cast(RouterLinks, [self.first, self.second]), ttl_s=2.0)

    def expired(self, now: float, *request_ids: Any) -> list[str]:
        return self.leases.expired(request_ids, now)


def test_a_router_that_is_away_briefly_loses_nothing() -> None:
    lines = Lines()
    assert lines.expired(0.0, "first.a", "second.b") == []
    lines.second.is_connected = False
    assert lines.expired(1.9, "first.a", "second.b") == []
    lines.second.is_connected = True
    assert lines.expired(2.5, "first.a", "second.b") == []
    lines.second.is_connected = False
    assert lines.expired(4.4, "first.a", "second.b") == []
    assert lines.expired(4.6, "first.a", "second.b") == ["second.b"]


def test_a_restarted_router_inherits_nothing() -> None:
    lines = Lines()
    lines.expired(0.0, "second.old")
    lines.second.router = "third"
    assert lines.expired(1.0, "second.old", "third.new") == []
    assert lines.expired(2.1, "second.old", "third.new") == ["second.old"]


def test_late_requests_of_a_lost_router_end_too() -> None:
    lines = Lines()
    assert lines.expired(100.0, "unheard.late") == []
    assert lines.expired(102.1, "unheard.late") == ["unheard.late"]


def test_without_any_router_nothing_ends() -> None:
    lines = Lines()
    lines.expired(0.0, "first.a", "second.b")
    lines.first.is_connected = lines.second.is_connected = False
    assert lines.expired(50.0, "first.a", "second.b") == []
    lines.second.is_connected = True
    assert lines.expired(51.0, "first.a", "second.b") == ["first.a"]


def test_an_id_names_its_router() -> None:
    assert router_of(new_request_id("abc")) == "abc"


LETTERS = "start: /[a-z]+/"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the vocabularies of the tokenizers that are loaded."""
    seen: list[int] = []

    def load(text: str, n_vocab: int, eos_token: list[int]) -> object:
        seen.append(n_vocab)
        return LLTokenizer(text, n_vocab, eos_token)

    monkeypatch.setattr(grammars, "LLTokenizer", load)
    grammars._load_vocabulary.cache_clear()
    yield seen
    grammars._load_vocabulary.cache_clear()


def test_a_template_loads_them_for_all_of_its_workers(loads: list[int]) -> None:
    config = ServeConfig(
        model=bundled_path("tandem-code-1m"), device="cpu", kv_cache_memory_bytes=2**23, max_model_len=64
    )
    try:
        assert preload_models(config)
        assert loads == [4096]
        engine, _ = build_engine(config)
    finally:
        keep_preloaded([])
    engine._grammars.compile(LETTERS).result()
    assert loads == [4096]


def test_a_worker_without_a_tokenizer_serves_all_the_same(model_folder: Path, loads: list[int]) -> None:
    engine, _ = build_engine(tiny_config(model_folder))
    with pytest.raises(grammars.InvalidRequestError, match="grammar: "):
        engine._grammars.compile(LETTERS).result()
    assert loads == []
