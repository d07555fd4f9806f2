"""A new role needs only an entry in the table and a package with its loop."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.shapes.tokenizer import save_tokenizer
from deploy.resources import choose_threads
from deploy.slots import make_slots
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.roles import ROLES, RoleSpec
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import VOCAB_SIZE, write_tiny_llama
from worker.launch import Launch

PLAIN = RoleSpec(
    name="plain",
    loop="tests.roles.plain_worker.loop:PlainLoop",
    replicas="decode_replicas",
    tasks=("decode",),
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLES, "plain", PLAIN)


def test_its_worker_registers_serves_and_ends(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_llama(model)
    save_tokenizer(model, VOCAB_SIZE, 1024)
    with HttpServing(model, {"plain-0": ""}) as serving:
        assert serving.worker_states()["plain-0"]["role"] == "plain"
        body = {"model": "model", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}
        answer = serving.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 6
        serving.wait(lambda: serving.counter("plain-0", "computed_tokens_total") > 0)
        assert serving.workers["plain-0"].ended_when_told() == ""


def test_its_workers_are_supervised_and_counted() -> None:
    config = ServeConfig(decode_replicas=2)
    assert choose_threads(config, 10) == (2, "10 cores for 5 workers")
    slots = {slot.worker_id: slot.role for slot in make_slots(config)}
    assert list(slots) == ["prefill-0", "decode-0", "decode-1", "plain-0", "plain-1"]
    launch = Launch(
        role=slots["plain-0"],
        worker_id="plain-0",
        incarnation="i",
        router_endpoints=["tcp://127.0.0.1:1"],
        config=config,
        keys=ClusterKeys.generate(),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(launch), type=Launch).role == PLAIN
