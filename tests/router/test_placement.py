"""The placement policy and the registry of workers, on their own."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.messages import PeerAddress, Register, WorkerState
from protocol.roles import ROLES
from router.placement import POLICIES, placement_policy
from router.placement.interface import Placement, Refusal, RequestFacts, WorkerSnapshot
from router.registry import Registry

REQUEST = RequestFacts()


def prefill(name: str, **load) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, tasks=ROLES["prefill"].tasks, **load)


def decode(name: str, **load) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, tasks=ROLES["decode"].tasks, **load)


def least_loaded(workers, request=REQUEST):
    return placement_policy("least_loaded")(request, workers)


def test_picks_the_least_loaded_of_each_role():
    workers = [
        prefill("p0", prefill_tokens=500),
        prefill("p1", prefill_tokens=20, requests=9),
        decode("d0", requests=3),
        decode("d1", requests=2),
    ]
    assert least_loaded(workers).workers == {"prefill": "p1", "decode": "d1"}


def test_kv_usage_breaks_ties():
    workers = [decode("d0", kv_usage=0.9), decode("d1", kv_usage=0.5)]
    assert least_loaded(workers).workers["decode"] == "d1"


def test_fallbacks():
    assert least_loaded([decode("d0")]) == Placement({"decode": "d0"}, missing="prefill")
    assert least_loaded([prefill("p0")]) == Placement({"decode": "p0"}, missing="decode")
    both = [prefill("p0"), decode("d0")]
    assert least_loaded(both, RequestFacts(disaggregate=False)) == Placement({"decode": "d0"})
    only_prefill = WorkerSnapshot(worker_id="p0", tasks=("prefill",))
    assert isinstance(least_loaded([only_prefill]), Refusal), "it may not be asked to decode"
    assert isinstance(least_loaded([]), Refusal)


def test_who_holds_the_prompt_prefills_it_again():
    workers = [prefill("p0"), prefill("p1", prefill_tokens=500), decode("d0")]
    assert least_loaded(workers, RequestFacts(prefix_at="p1")).workers["prefill"] == "p1"
    assert least_loaded(workers, RequestFacts(prefix_at="p2")).workers["prefill"] == "p0"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_are_pure(policy):
    workers = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    assert policy(REQUEST, workers) == policy(REQUEST, list(workers)) == policy(REQUEST, workers[::-1])


def test_unknown_policy():
    with pytest.raises(ConfigError, match="--placement"):
        placement_policy("magic")


class Recorder:
    """A registry, and what it called."""

    def __init__(self) -> None:
        self.greeted: list[str] = []
        self.lost: list[str] = []
        self.registry = Registry(5.0)
        self.registry.on_registered = lambda worker: self.greeted.append(worker.key.incarnation)
        self.registry.on_lost = lambda worker, reason: self.lost.append(worker.key.incarnation)

    def register(self, incarnation: str, max_model_len: int = 100, role: str = "decode", worker_id="w"):
        return self.registry.register(
            Register(
                address=PeerAddress(worker_id=worker_id, incarnation=incarnation, control="tcp://x:1"),
                role=role,
                model="m",
                max_model_len=max_model_len,
                vocab_size=10,
                eos_token_ids=[0],
                state=state(incarnation),
            )
        )


def state(incarnation: str) -> WorkerState:
    return WorkerState(worker_id="w", incarnation=incarnation, role="decode")


def test_a_new_incarnation_replaces_the_old():
    recorder = Recorder()
    recorder.register("one")
    recorder.register("two")
    assert (recorder.greeted, recorder.lost) == (["one", "two"], ["one"])
    assert recorder.registry.current("w", "one") is None
    assert not recorder.registry.update(state("one"))
    assert recorder.registry.update(state("two"))
    assert recorder.register("one") is None, "a registration that comes late"
    assert [worker.key.incarnation for worker in recorder.registry.live()] == ["two"]


def test_registering_again_is_harmless():
    recorder = Recorder()
    assert recorder.register("one") is recorder.register("one")
    assert (recorder.greeted, recorder.lost) == (["one", "one"], [])


def test_a_workers_load_is_what_was_sent_or_reported_whichever_is_more():
    worker = Recorder().register("one")
    worker.outstanding_requests, worker.outstanding_prefill_tokens = 2, 50
    snapshot = worker.snapshot()
    assert (snapshot.requests, snapshot.prefill_tokens, snapshot.kv_usage) == (2, 50, 0.0)
    load = {"num_running": 1, "num_waiting": 2, "waiting_tokens": 40}
    blocks = {"total_blocks": 10, "free_blocks": 3, "cached_blocks": 2}
    worker.state = msgspec.structs.replace(state("one"), **load, **blocks)
    snapshot = worker.snapshot()
    assert (snapshot.requests, snapshot.prefill_tokens, snapshot.kv_usage) == (3, 50, 0.5)


def sweep_for(registry: Registry, seconds: float, *, begin: float = 0.0, interval_s: float = 0.25) -> None:
    """Let this time pass, as the router's timer does."""
    for turn in range(round(seconds / interval_s) + 1):
        registry.sweep(begin + turn * interval_s)


def test_silence_and_return():
    recorder = Recorder()
    recorder.register("one")
    recorder.registry.sweep(0.0)
    assert recorder.registry.update(state("one"))
    sweep_for(recorder.registry, 4.75)
    assert recorder.lost == []
    sweep_for(recorder.registry, 0.75, begin=4.75)
    assert (recorder.lost, recorder.registry.live()) == (["one"], [])
    assert recorder.registry.update(state("one"))
    assert len(recorder.registry.live()) == 1


def test_a_pause_of_the_router_is_no_silence_of_a_worker():
    """It read nothing in that time, so nobody could be heard."""
    recorder = Recorder()
    worker = recorder.register("one")
    recorder.registry.sweep(0.0)
    assert recorder.registry.update(state("one"))
    sweep_for(recorder.registry, 60.0, begin=10.0, interval_s=10.0)
    assert recorder.lost == [], "seven turns of the timer"
    sweep_for(recorder.registry, 5.0, begin=70.0)
    assert recorder.lost == ["one"]
    assert worker.silence_s > 5


def test_all_silent_workers_are_lost_at_once():
    """Or the requests of the first would be placed at the second."""
    recorder = Recorder()
    workers = [recorder.register("one", worker_id="v"), recorder.register("two", worker_id="w")]
    live_then = []
    recorder.registry.on_lost = lambda worker, reason: live_then.append(len(recorder.registry.live()))
    recorder.registry.sweep(0.0)
    for worker in workers:
        recorder.registry.heard(worker)
    sweep_for(recorder.registry, 6.0)
    assert live_then == [0, 0]


def test_an_unknown_role_is_refused():
    recorder = Recorder()
    assert recorder.register("one", role="boss") is None
    assert recorder.registry.live() == []


def test_who_is_awaited():
    recorder = Recorder()
    recorder.registry.expected = ["v", "w"]
    assert recorder.registry.awaited() == ["v", "w"]
    worker = recorder.register("one")
    assert recorder.registry.awaited() == ["v"]
    worker.is_reachable = False
    assert recorder.registry.awaited() == ["v", "w"]
    assert recorder.registry.update(state("one"))
    assert recorder.registry.awaited() == ["v"]


def test_a_dead_one_never_returns():
    recorder = Recorder()
    recorder.register("one")
    recorder.registry.mark_dead("w", "one", "it was killed")
    recorder.registry.mark_dead("w", "one", "again")
    assert recorder.lost == ["one"]
    assert not recorder.registry.update(state("one"))
    assert recorder.register("one") is None
    recorder.registry.mark_dead("w", "two", "before it could register")
    assert recorder.register("two") is None
    assert recorder.register("three") is not None


def test_another_model_is_refused():
    recorder = Recorder()
    recorder.register("one")
    assert recorder.register("two", max_model_len=50) is None
    assert recorder.registry.current("w", "one") is not None
