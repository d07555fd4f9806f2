"""Adapters on a hanging disk: only requests that need them wait, and with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from decode_worker.loop import DecodeLoop
from engine.engine import Engine
from engine.lora.files import AdapterFiles
from protocol.requests import Adapter, EngineRequest
from protocol.router_to_worker import Abort, LoadAdapter, UnloadAdapter
from protocol.worker_to_router import AdapterLoaded
from protocol.worker_to_worker import Reserve, Reserved, ReserveRefused
from tests.engine.adapter_files import write_adapter
from tests.waiting import wait_until
from tests.worker.light_loop import OURS, LightLoop, ask, small_engine
from worker.adapter_loads import MOST_STALLED, READS_AT_ONCE, STALL_S

Adapters = dict[str, Adapter]
PROMPT = range(1, 21)
NAMES = ("one", "other")


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return small_engine(model_folder, 12, enable_lora=True)


@pytest.fixture(scope="module")
def adapters(engine: Engine, model_folder: Path) -> Adapters:
    """Return adapters that are not loaded."""
    assert engine.adapters is not None
    found = {}
    for seed, name in enumerate(NAMES):
        path = str(write_adapter(model_folder, model_folder / name, seed))
        found[name] = Adapter(name=name, path=path, digest=engine.adapters.read(path).digest)
    return found


class Disk:
    """The adapters' disk. Reads of some folders hang until `go_on`."""

    def __init__(self, read: Callable[..., AdapterFiles]) -> None:
        self._read = read
        self._goes_on: dict[str, threading.Event] = {}
        self.begun: list[str] = []

    def stop(self, path: str) -> None:
        self._goes_on[path] = threading.Event()

    def go_on(self) -> None:
        for path in list(self._goes_on):
            self._goes_on.pop(path).set()

    def read(self, path: str, on_piece: Callable[[], None] = lambda: None) -> AdapterFiles:
        self.begun.append(path)
        if (goes_on := self._goes_on.get(path)) is not None:
            assert goes_on.wait(20)
        return self._read(path, on_piece)


@pytest.fixture
def disk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    assert engine.adapters is not None
    disk = Disk(engine.adapters.read)
    monkeypatch.setattr(engine.adapters, "read", disk.read)
    yield disk
    disk.go_on()


@pytest.fixture
def light(engine: Engine, disk: Disk) -> Iterator[LightLoop]:
    light = LightLoop(DecodeLoop, engine, "decode")
    yield light
    light.finish()
    light.loop._do_upkeep(time.monotonic())
    assert engine.adapters is not None and not engine.adapters.listed()
    assert not engine.adapters._weights, "nobody needs them any more"


def named(request: EngineRequest, adapter: Adapter) -> EngineRequest:
    return msgspec.structs.replace(request, adapter=adapter)


def generate(light: LightLoop, name: str, adapter: Adapter) -> None:
    light.generate(named(ask(name, PROMPT), adapter))


def poll(light: LightLoop, later_s: float = 0.0) -> None:
    light.loop.adapter_loads.poll(time.monotonic() + later_s)
    light.flush()


def until(light: LightLoop, done: Callable[[], bool]) -> None:
    """Continue with what the disk returns until `done`."""
    wait_until(done, meanwhile=lambda: poll(light))


def tokens(light: LightLoop, request_id: str) -> list[int]:
    light.run()
    assert light.num_ends(request_id) == 1
    outputs = [each for each in light.router.outputs if each.request_id == request_id]
    return [token for output in outputs for token in output.token_ids]


def error(light: LightLoop, request_id: str) -> Any:
    (output,) = (each for each in light.router.outputs if each.request_id == request_id)
    assert output.finish_reason == "error"
    return output


def test_others_run_while_a_request_waits_for_its_adapter(
    light: LightLoop, disk: Disk, adapters: Adapters
) -> None:
    disk.stop(adapters["one"].path)
    generate(light, "waits", adapters["one"])
    light.generate(ask("plain", PROMPT))
    generate(light, "another", adapters["other"])
    assert len(tokens(light, "plain")) == 4
    until(light, lambda: light.loop.knows("another"))
    assert len(tokens(light, "another")) == 4
    assert light.num_ends("waits") == 0 and not light.loop.knows("waits")
    assert light.loop._has("waits"), "a roll call finds it"
    disk.go_on()
    until(light, lambda: light.loop.knows("waits"))
    with_it = tokens(light, "waits")
    assert len(with_it) == 4 and with_it != tokens_without(light)


def tokens_without(light: LightLoop) -> list[int]:
    light.generate(ask("base", PROMPT))
    return tokens(light, "base")


def test_a_stalled_read_fails_for_its_requests_alone(
    light: LightLoop, disk: Disk, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    one = adapters["one"]
    disk.stop(one.path)
    generate(light, "first", one)
    poll(light, STALL_S / 2)
    assert light.num_ends("first") == 0
    poll(light, STALL_S + 1)
    failed = error(light, "first")
    assert failed.error_kind == "timeout"
    assert f"model: one: {one.path}: nothing came from its files for 10 s" in failed.error
    assert light.loop.counters["adapter_loads_stalled_total"] == 1
    assert "nothing came from its files" in caplog.text
    generate(light, "second", one)
    assert error(light, "second").error_kind == "timeout", "at once"
    assert disk.begun.count(one.path) == 1, "one thread waits for it, not more and more"
    light.generate(ask("plain", PROMPT))
    assert len(tokens(light, "plain")) == 4
    disk.go_on()
    until(light, lambda: not light.loop.adapter_loads._stalled)
    generate(light, "third", one)
    until(light, lambda: light.loop.knows("third"))
    assert len(tokens(light, "third")) == 4


def test_a_slow_read_that_progresses_is_waited_for(light: LightLoop, disk: Disk, adapters: Adapters) -> None:
    disk.stop(adapters["one"].path)
    generate(light, "slow", adapters["one"])
    (read,) = light.loop.adapter_loads._reads.values()
    for later_s in (8.0, 16.0, 24.0):
        read.moved_at = time.monotonic() + later_s - 1
        poll(light, later_s)
    assert light.num_ends("slow") == 0
    disk.go_on()
    until(light, lambda: light.loop.knows("slow"))
    assert len(tokens(light, "slow")) == 4


def test_an_aborted_request_does_not_run_when_its_adapter_comes(
    light: LightLoop, disk: Disk, adapters: Adapters
) -> None:
    disk.stop(adapters["one"].path)
    generate(light, "gone", adapters["one"])
    light.hear(Abort(request_ids=["gone"]))
    disk.go_on()
    until(light, lambda: not light.loop.adapter_loads._reads)
    assert not light.loop.knows("gone") and light.router.outputs == []


def reserve(light: LightLoop, name: str, adapter: Adapter) -> None:
    message = Reserve(
        incarnation=OURS,
        request=named(ask(name, PROMPT), adapter),
        prefill_worker="prefill-0",
        prefill_incarnation="b" * 16,
        segments=light.engine.pool.segments,
        ttl_s=10.0,
    )
    light.loop.on_peer_request(b"prefill-0:" + b"b" * 16, message)


def test_a_hand_off_waits_for_the_adapter_too(light: LightLoop, disk: Disk, adapters: Adapters) -> None:
    one = adapters["one"]
    disk.stop(one.path)
    reserve(light, "late", one)
    reserve(light, "late", one)  # as a waiting prefill worker does
    assert light.inbox.replies == []
    disk.go_on()
    until(light, lambda: bool(light.inbox.replies))
    ((_, grant),) = light.inbox.replies
    assert isinstance(grant, Reserved)
    disk.stop(adapters["other"].path)
    reserve(light, "never", adapters["other"])
    poll(light, STALL_S + 1)
    refusal = light.inbox.replies[-1][1]
    assert isinstance(refusal, ReserveRefused)
    assert (refusal.error_kind, refusal.request_id) == ("timeout", "never"), "another worker may have it"


def test_an_adapter_stays_while_a_request_waits_for_room(
    light: LightLoop, disk: Disk, adapters: Adapters
) -> None:
    """Its name is gone by then and the disk hangs, so the loop must not read anything."""
    one = adapters["one"]
    light.generate(ask("big", range(1, 101), max_tokens=20))
    light.step()
    load(light, "one", one)
    reserve(light, "queued", msgspec.structs.replace(one))
    reserve(light, "queued-too", one)
    reserve(light, "queued-last", one)
    assert any(request.stage.name == "QUEUED" for request in light.requests)
    light.hear(UnloadAdapter(incarnation=OURS, name="one"))
    disk.stop(one.path)
    light.run()
    light.loop._serve_queue()
    grants = [reply for _, reply in light.inbox.replies]
    assert len(grants) == 3 and all(isinstance(grant, Reserved) for grant in grants)


def load(light: LightLoop, name: str, adapter: Adapter) -> list[AdapterLoaded]:
    """Return the answers, once there is one."""
    answers: list[AdapterLoaded] = []
    message = LoadAdapter(incarnation=OURS, name=name, path=adapter.path)
    light.loop.take(message, SimpleNamespace(send=answers.append))
    until(light, lambda: bool(answers))
    return answers


def test_the_router_is_told_the_result_of_a_load(light: LightLoop, disk: Disk, adapters: Adapters) -> None:
    one = adapters["one"]
    (answer,) = load(light, "sql", one)
    assert (answer.name, answer.digest, answer.error) == ("sql", one.digest, "")
    nothing = Adapter(name="none", path=one.path + "/none", digest="0" * 32)
    (answer,) = load(light, "none", nothing)
    assert answer.error_kind == "invalid" and "adapter_config.json: cannot be read" in answer.error
    disk.stop(adapters["other"].path)
    answers: list[AdapterLoaded] = []
    message = LoadAdapter(incarnation=OURS, name="late", path=adapters["other"].path)
    light.loop.take(message, SimpleNamespace(send=answers.append))
    poll(light, STALL_S + 1)
    assert [answer.error_kind for answer in answers] == ["timeout"]
    light.hear(UnloadAdapter(incarnation=OURS, name="sql"))


def test_an_adapter_unloaded_during_its_read_gets_no_name(
    light: LightLoop, disk: Disk, adapters: Adapters
) -> None:
    disk.stop(adapters["one"].path)
    light.hear(LoadAdapter(incarnation=OURS, name="one", path=adapters["one"].path))
    light.hear(UnloadAdapter(incarnation=OURS, name="one"))
    disk.go_on()
    until(light, lambda: not light.loop.adapter_loads._reads)
    assert light.engine.adapters is not None and light.engine.adapters.listed() == []


def test_reads_and_hanging_threads_are_limited(light: LightLoop, disk: Disk) -> None:
    paths = [f"/adapters/{number}" for number in range(MOST_STALLED + 2 * READS_AT_ONCE)]
    for path in paths:
        disk.stop(path)
    for number, path in enumerate(paths):
        generate(light, f"r{number}", Adapter(name="x", path=path, digest=f"{number:032x}"))
    loads = light.loop.adapter_loads
    assert len(loads._reads) == READS_AT_ONCE
    for _ in range(MOST_STALLED // READS_AT_ONCE):
        poll(light, STALL_S + 1)
    assert len(loads._stalled) == MOST_STALLED and not loads._reads
    assert len(light.router.outputs) == len(paths), "the last ones are refused unread"
    disk.go_on()
    until(light, lambda: not loads._stalled)
