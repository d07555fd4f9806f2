"""Registered workers, the stages of requests at them, and their loads."""

from __future__ import annotations

import time
from math import inf

import msgspec
import pytest
import zmq

from messaging.sockets import connect_dealer
from protocol.codec import router_to_worker
from protocol.costs import StepCosts
from protocol.router_to_worker import Refused
from protocol.version import PROTOCOL
from protocol.worker_to_router import WorkerState
from router.workers.assignment import Loads, Stage
from router.workers.registry import ALONE_S, WATCH_INTERVAL_S, Registry, Worker
from tests.router.placed import registration


class Recorder:
    """A registry, and the calls that it made."""

    def __init__(self) -> None:
        self.greeted: list[str] = []
        self.lost: list[str] = []
        self.registry = Registry(5.0)
        self.registry.on_registered = lambda worker: self.greeted.append(worker.key.incarnation)
        self.registry.on_lost = lambda worker, reason: self.lost.append(worker.key.incarnation)

    def register(
        self, incarnation: str, max_model_len: int = 100, role: str = "decode", worker_id="w", host=""
    ):
        told = {"max_model_len": max_model_len, "host": host}
        return self.registry.register(registration(worker_id, incarnation, role, state(incarnation), **told))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def state(incarnation: str) -> WorkerState:
    return WorkerState(worker_id="w", incarnation=incarnation, role="decode")


def test_a_new_incarnation_replaces_the_old(recorder):
    recorder.register("one")
    recorder.register("two")
    assert (recorder.greeted, recorder.lost) == (["one", "two"], ["one"])
    assert recorder.registry.current("w", "one") is None
    assert not recorder.registry.update(state("one"))
    assert recorder.registry.update(state("two"))
    assert recorder.register("one") is None, "a registration that comes late"
    assert [worker.key.incarnation for worker in recorder.registry.live()] == ["two"]


def test_registering_again_is_harmless(recorder):
    assert recorder.register("one") is recorder.register("one")
    assert (recorder.greeted, recorder.lost) == (["one", "one"], [])


def test_a_workers_load_is_the_larger_of_sent_and_reported(recorder):
    worker = recorder.register("one")
    worker.outstanding_requests, worker.outstanding_prefill_tokens = 2, 50
    worker.update_load()
    assert (worker.load.requests, worker.load.prefill_tokens, worker.load.kv_usage) == (2, 50, 0.0)
    load = {"num_running": 1, "num_waiting": 2, "waiting_tokens": 40}
    blocks = {"total_blocks": 10, "free_blocks": 3, "cached_blocks": 2}
    worker.update(msgspec.structs.replace(state("one"), **load, **blocks))
    assert (worker.load.requests, worker.load.prefill_tokens, worker.load.kv_usage) == (3, 50, 0.5)


def sweep_for(registry: Registry, seconds: float, *, begin: float = 0.0, interval_s: float = 0.25) -> None:
    """Let this time pass, as the router's timer does."""
    for turn in range(round(seconds / interval_s) + 1):
        registry.sweep(begin + turn * interval_s)


def test_silence_and_return(recorder):
    recorder.register("one")
    recorder.registry.sweep(0.0)
    assert recorder.registry.update(state("one"))
    sweep_for(recorder.registry, 4.75)
    assert recorder.lost == []
    sweep_for(recorder.registry, 0.75, begin=4.75)
    assert (recorder.lost, recorder.registry.live()) == (["one"], [])
    assert recorder.registry.update(state("one"))
    assert len(recorder.registry.live()) == 1


def test_a_heartbeat_with_a_stuck_loop_is_no_sign_of_life(recorder):
    worker = recorder.register("one")
    recorder.registry.sweep(0.0)
    assert recorder.registry.update(state("one"))
    stuck = msgspec.structs.replace(state("one"), stalled_s=12.0)
    for turn in range(1, 30):
        assert recorder.registry.update(stuck)
        recorder.registry.sweep(turn * 0.25)
    assert recorder.lost == ["one"] and worker.silence_s > 5
    assert recorder.registry.update(state("one")), "it goes on"
    assert worker.live and worker.silence_s == 0


def test_a_pause_of_the_router_is_not_blamed_on_workers(recorder):
    """It read nothing in that time, so no worker could be heard."""
    worker = recorder.register("one")
    recorder.registry.sweep(0.0)
    assert recorder.registry.update(state("one"))
    sweep_for(recorder.registry, 60.0, begin=10.0, interval_s=10.0)
    assert recorder.lost == [], "seven turns of the timer"
    sweep_for(recorder.registry, 5.0, begin=70.0)
    assert recorder.lost == ["one"]
    assert worker.silence_s > 5


def test_all_silent_workers_are_lost_at_once(recorder):
    """Otherwise requests of the first would be placed on the second."""
    workers = [recorder.register("one", worker_id="v"), recorder.register("two", worker_id="w")]
    live_then = []
    recorder.registry.on_lost = lambda worker, reason: live_then.append(len(recorder.registry.live()))
    recorder.registry.sweep(0.0)
    for worker in workers:
        recorder.registry.note_message(worker)
    sweep_for(recorder.registry, 6.0)
    assert live_then == [0, 0]


def suspect_after(worker: Worker, registry: Registry, begin: float) -> float:
    """Let a worker fall silent. Return the silence after which it is suspect."""
    for turn in range(1, 40):
        registry.note_message(registry.named("other"))
        registry.sweep(begin + turn * WATCH_INTERVAL_S)
        if worker.is_suspect:
            return turn * WATCH_INTERVAL_S
    return inf


@pytest.mark.parametrize(
    ("decoding", "step_s", "delay", "silence_s"),
    [
        (0, 0.01, 0, 0.4),  # only a heartbeat is due
        (1, 0.01, 0, 0.15),  # a step is
        (1, 0.2, 0, 0.35),  # a long step is
        (1, 9.0, 0, 0.4),  # a heartbeat comes before the step
        (1, 0.01, 6, 0.45),  # its messages were up to 0.3 s late
    ],
)
def test_a_late_worker_is_suspect(recorder, decoding: int, step_s: float, delay: int, silence_s: float):
    """It is so after a silence that neither its steps nor its latest delays explain, and until it speaks."""
    registry = recorder.registry
    worker = recorder.register("one")
    recorder.register("two", worker_id="other")
    costs = StepCosts(step_s=step_s)
    registry.update(msgspec.structs.replace(state("one"), costs=costs))
    worker.num_decoding, now = decoding, time.monotonic()
    registry.sweep(now)
    registry.note_message(worker)
    for turn in range(1, delay + 1):
        registry.note_message(registry.named("other"))
        registry.sweep(now + turn * WATCH_INTERVAL_S)
    registry.note_message(worker)
    assert suspect_after(worker, registry, now + delay * WATCH_INTERVAL_S) == pytest.approx(silence_s)
    assert in_cluster(registry) == ["other"] and worker in registry.live()
    registry.sweep(now + 2.0)
    for each in registry:
        registry.note_message(each)
    registry.sweep(now + 2.05)
    assert not worker.is_suspect and sorted(in_cluster(registry)) == ["other", "w"]


def test_no_worker_is_suspect_if_no_other_is_better(recorder):
    """Neither if all are silent, nor once the others are lost, nor right after a pause of the router."""
    registry = recorder.registry
    worker, other = recorder.register("one"), recorder.register("two", worker_id="other")
    now = time.monotonic()
    for turn in range(20):
        registry.sweep(now + turn * WATCH_INTERVAL_S)
    assert not worker.is_suspect and not other.is_suspect
    registry.note_message(other)
    registry.sweep(now + 20 * WATCH_INTERVAL_S)
    assert worker.is_suspect
    registry.mark_dead("other", "two", "it was killed")
    assert not worker.is_suspect and in_cluster(registry) == ["w"]
    recorder.register("three", worker_id="other")
    registry.sweep(now + 5.0)
    assert not worker.is_suspect


def test_the_last_worker_of_a_role_is_suspect_if_the_other_role_is_punctual(recorder):
    """Later than one whose own role can take over, and only until nobody is left who could."""
    registry = recorder.registry
    worker = recorder.register("one", role="prefill")
    recorder.register("two", worker_id="other")
    now = time.monotonic()
    registry.sweep(now)
    assert suspect_after(worker, registry, now) == pytest.approx(ALONE_S, abs=WATCH_INTERVAL_S)
    assert in_cluster(registry) == ["other"]
    registry.mark_dead("other", "two", "it was killed")
    assert not worker.is_suspect and in_cluster(registry) == ["w"]


def test_expected_workers(recorder):
    recorder.registry.expected = {"v": "decode", "w": "decode"}
    assert recorder.registry.awaited() == ["v", "w"]
    worker = recorder.register("one")
    assert recorder.registry.awaited() == ["v"]
    worker.is_reachable = False
    assert recorder.registry.awaited() == ["v", "w"]
    assert recorder.registry.update(state("one"))
    assert recorder.registry.awaited() == ["v"]


def test_a_dead_incarnation_never_returns(recorder):
    recorder.register("one")
    recorder.registry.mark_dead("w", "one", "it was killed")
    recorder.registry.mark_dead("w", "one", "again")
    assert recorder.lost == ["one"]
    assert not recorder.registry.update(state("one"))
    assert recorder.register("one") is None
    recorder.registry.mark_dead("w", "two", "before it could register")
    assert recorder.register("two") is None
    assert recorder.register("three") is not None


def test_another_model_is_refused(recorder):
    recorder.register("one")
    assert recorder.register("two", max_model_len=50) is None
    assert recorder.registry.current("w", "one") is not None


def in_cluster(registry: Registry) -> list[str]:
    """Return the workers that policies see."""
    return [worker.worker_id for worker in registry.cluster]


def test_policies_see_reachable_workers(recorder):
    registry = recorder.registry
    registry.sweep(0.0)
    worker = recorder.register("one")
    assert in_cluster(registry) == ["w"]
    worker.is_reachable = False
    registry.changed(worker)
    assert in_cluster(registry) == []
    assert registry.update(state("one"))
    assert in_cluster(registry) == ["w"]
    sweep_for(registry, 6.0)
    assert in_cluster(registry) == []
    registry.update(state("one"))
    new = recorder.register("two")
    assert registry.cluster.get("w") is new.load, "not the load of the incarnation before"
    registry.changed(worker)
    assert registry.cluster.get("w") is new.load
    registry.mark_dead("w", "two", "it was killed")
    assert in_cluster(registry) == []


def test_load_of_other_routers_is_not_counted_twice(recorder):
    """Requests that this router sends and gets back between two reports count at once."""
    worker = recorder.register("one")
    worker.outstanding_requests = 2
    worker.update(msgspec.structs.replace(state("one"), num_running=5))
    worker.outstanding_requests = 4
    worker.update_load()
    assert worker.load.requests == 7
    worker.outstanding_requests = 0
    worker.update_load()
    assert worker.load.requests == 3


def test_workers_of_one_host_know_each_other(recorder):
    hosts = {"a": "one", "b": "one", "c": "two", "d": "", "e": ""}
    workers = {name: recorder.register(f"{name}1", worker_id=name, host=host) for name, host in hosts.items()}

    def beside(name):
        return [other.worker_id for other in workers[name].load.on_host]

    assert [beside(name) for name in hosts] == [["a", "b"], ["a", "b"], ["c"], [], []]
    workers["b"] = recorder.register("b2", worker_id="b", host="one")
    assert workers["a"].load.on_host[1] is workers["b"].load
    recorder.registry.mark_dead("a", "a1", "it died")
    assert beside("b") == ["b"]
    recorder.registry.dismiss(workers["c"])
    assert beside("b") == ["b"]


def refused_with(recorder: Recorder, **changes) -> str:
    """Return why a worker is refused that is like the others but for `changes`."""
    reasons: list[str] = []
    recorder.registry.on_refused = lambda key, reason: reasons.append(reason)
    recorder.register("one")
    assert recorder.registry.register(registration("v", "two", **changes)) is None
    assert [worker.key.worker_id for worker in recorder.registry.live()] == ["w"]
    (reason,) = reasons
    return reason


def test_workers_of_other_weights_or_roles_are_refused_by_name():
    reason = refused_with(Recorder(), weights="other")
    assert reason == "the worker has weights 'other', the cluster ''"
    assert refused_with(Recorder(), role="cook") == "there is no role 'cook'"


REGISTER = msgspec.to_builtins(registration("decode-0", "a" * 16, protocol=PROTOCOL + 1, release="9.8"))


@pytest.mark.parametrize("changes", [{}, {"state": "of another kind", "model": None}])
def test_a_worker_of_another_protocol_is_refused(make_router, changes):
    router = make_router()
    with zmq.Context() as context:
        socket = connect_dealer(context, router.keys, router.server.state.link.endpoint, "decode-0")
        socket.send(msgspec.msgpack.encode(REGISTER | changes))
        assert socket.poll(20_000)
        answer = router_to_worker.decode(socket.recv())
        socket.close()
    assert isinstance(answer, Refused) and answer.incarnation == "a" * 16
    assert f"protocol {PROTOCOL}, the worker (Tandem 9.8) {PROTOCOL + 1}" in answer.reason
    assert router.metric("tandem_messages_dropped_total", reason="refused_registration") == 1
    assert router.http.get("/workers").json()["workers"] == []


def start(registry: Registry, worker_id: str) -> Worker:
    role, incarnation = worker_id.partition("-")[0], f"{worker_id}-1"
    worker = registry.register(registration(worker_id, incarnation, role))
    assert worker is not None
    return worker


@pytest.fixture
def registry() -> Registry:
    return Registry(worker_timeout=1.0)


def counts(*workers: Worker) -> list[tuple[int, int, int]]:
    return [(w.outstanding_requests, w.outstanding_prompts, w.outstanding_rows) for w in workers]


def test_a_split_request(registry):
    loads, prefill, decode = Loads(registry), start(registry, "prefill-0"), start(registry, "decode-0")
    at = loads.assign(prefill, decode, num_tokens=50, num_uncached=40)
    assert (at.stage, at.stage.shown, at.holders) == (Stage.HELD, "queue", [prefill, decode])
    assert not at.is_sent_to(prefill), "it has not left the router"
    loads.sent(at)
    assert (at.stage.shown, at.waits_at, at.worker, at.answered_by) == ("prefill", prefill, prefill, None)
    assert counts(prefill, decode) == [(1, 1, 0), (1, 0, 1)]
    loads.answered(at)
    assert (at.stage, at.stage.shown, at.answered_by) == (Stage.TRANSFER, "transfer", prefill)
    loads.handed_over(at)
    assert (at.stage.shown, at.holders, at.worker, at.answered_by) == ("transfer", [decode], decode, prefill)
    loads.taken_over(at)
    assert (at.stage.shown, at.answered_by, at.is_sent_to(prefill)) == ("decode", decode, False)
    assert counts(prefill, decode) == [(0, 0, 0), (1, 0, 1)]
    loads.release(at)
    loads.release(at)
    assert (at.stage.shown, at.holders, at.is_sent_to(decode)) == ("queue", [], False)
    assert counts(prefill, decode) == [(0, 0, 0), (0, 0, 0)]
    assert at.worker_ids == {"prefill": "prefill-0", "decode": "decode-0"}, "it can still be told"


@pytest.mark.parametrize("has_answered", [False, True])
def test_the_prefill_worker_finally_decodes(registry, has_answered):
    loads, prefill = Loads(registry), start(registry, "prefill-0")
    decodes = [start(registry, f"decode-{number}") for number in range(2)]
    at = loads.assign(prefill, decodes[0], num_tokens=50, num_uncached=40)
    loads.sent(at)
    if has_answered:
        loads.answered(at)
    loads.redirect(at, decodes[1])
    assert (at.decode, counts(*decodes)) == (decodes[1], [(0, 0, 0), (1, 0, 1)])
    assert (prefill.load.computed_prompts, prefill.load.computed_tokens) == (1, 40)
    loads.redirect(at, prefill)
    assert at.stage is (Stage.DECODE if has_answered else Stage.PREFILL)
    assert (at.prefill, at.holders, at.worker_ids) == (None, [prefill], {"decode": "prefill-0"})
    assert counts(prefill, *decodes) == [(1, int(not has_answered), 1), (0, 0, 0), (0, 0, 0)]
    loads.release(at)
    assert counts(prefill) == [(0, 0, 0)]
    assert prefill.outstanding_context == 0
    assert (prefill.load.computed_prompts, prefill.load.computed_tokens) == (0, 0)


def test_no_stage_is_skipped(registry):
    loads, worker = Loads(registry), start(registry, "decode-0")
    at = loads.assign(worker, worker, num_tokens=50, num_uncached=40)
    with pytest.raises(AssertionError, match="HELD -> DECODE"):
        loads.answered(at)
    assert (at.stage, counts(worker)) == (Stage.HELD, [(1, 1, 1)])
