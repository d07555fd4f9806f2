"""The placement policy and the registry of workers, on their own."""

from __future__ import annotations

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.messages import PeerAddress, Register, WorkerState
from router.placement import POLICIES, placement_policy
from router.placement.interface import Decision, Refusal, RequestFacts, WorkerSnapshot
from router.registry import Registry

REQUEST = RequestFacts(num_prompt_tokens=100, max_tokens=10)


def prefill(name: str, **load) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, role="prefill", **load)


def decode(name: str, **load) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id=name, role="decode", **load)


def least_loaded(workers, request=REQUEST):
    return placement_policy("least_loaded")(request, workers)


def test_picks_the_least_loaded_of_each_role():
    workers = [
        prefill("p0", outstanding_prefill_tokens=500),
        prefill("p1", outstanding_prefill_tokens=20, outstanding_requests=9),
        decode("d0", outstanding_requests=3),
        decode("d1", outstanding_requests=2),
    ]
    decision = least_loaded(workers)
    assert (decision.prefill, decision.decode, decision.predicted_cost) == ("p1", "d1", 120)
    assert decision.reasons


def test_own_requests_count_before_the_worker_reports_them():
    workers = [prefill("p0"), decode("d0", outstanding_requests=2), decode("d1", reported_requests=1)]
    assert least_loaded(workers).decode == "d1"
    workers = [prefill("p0"), decode("d0", outstanding_requests=2), decode("d1", reported_requests=3)]
    assert least_loaded(workers).decode == "d0"


def test_kv_usage_breaks_ties():
    workers = [decode("d0", total_blocks=10, free_blocks=1), decode("d1", total_blocks=10, free_blocks=5)]
    assert least_loaded(workers).decode == "d1"


def test_fallbacks():
    alone = least_loaded([decode("d0")])
    assert alone == Decision(None, "d0", 100, alone.reasons, missing_role="prefill")
    assert "no live prefill worker" in alone.reasons
    alone = least_loaded([prefill("p0")])
    assert alone == Decision(None, "p0", 100, alone.reasons, missing_role="decode")
    both = [prefill("p0"), decode("d0")]
    colocated = least_loaded(both, RequestFacts(100, 10, disaggregate=False))
    assert (colocated.prefill, colocated.decode, colocated.missing_role) == (None, "d0", None)
    assert isinstance(least_loaded([]), Refusal)
    assert isinstance(least_loaded([decode("d0", lifecycle="draining")]), Refusal)


def test_who_holds_the_prompt_prefills_it_again():
    workers = [prefill("p0"), prefill("p1", outstanding_prefill_tokens=500), decode("d0")]
    assert least_loaded(workers, RequestFacts(100, 10, prefix_at="p1")).prefill == "p1"
    assert least_loaded(workers, RequestFacts(100, 10, prefix_at="p2")).prefill == "p0"
    workers[1] = prefill("p1", lifecycle="draining")
    assert least_loaded(workers, RequestFacts(100, 10, prefix_at="p1")).prefill == "p0"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policies_are_pure(policy):
    workers = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    assert policy(REQUEST, workers) == policy(REQUEST, list(workers)) == policy(REQUEST, workers[::-1])


def test_unknown_policy():
    with pytest.raises(ConfigError, match="--placement"):
        placement_policy("magic")


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("router.registry.time.monotonic", lambda: self.now)


class Recorder:
    """A registry, and what it called."""

    def __init__(self) -> None:
        self.greeted: list[str] = []
        self.lost: list[str] = []
        self.registry = Registry(
            5.0,
            lambda worker: self.greeted.append(worker.key.incarnation),
            lambda worker, reason: self.lost.append(worker.key.incarnation),
        )

    def register(self, incarnation: str, max_model_len: int = 100):
        return self.registry.register(
            Register(
                address=PeerAddress(worker_id="w", incarnation=incarnation, control="tcp://x:1"),
                role="decode",
                model="m",
                max_model_len=max_model_len,
                vocab_size=10,
                eos_token_ids=[0],
                state=state(incarnation),
            )
        )


def state(incarnation: str) -> WorkerState:
    return WorkerState(worker_id="w", incarnation=incarnation, role="decode", lifecycle="ready")


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


def test_a_heartbeat_of_before_the_registration_takes_no_readiness_away():
    recorder = Recorder()
    worker = recorder.register("one")
    assert worker is not None
    assert recorder.registry.update(msgspec.structs.replace(state("one"), lifecycle="starting"))
    assert worker.snapshot().lifecycle == "ready"
    assert recorder.registry.update(msgspec.structs.replace(state("one"), lifecycle="draining"))
    assert worker.snapshot().lifecycle == "draining"


def test_silence_and_return(monkeypatch):
    clock, recorder = Clock(monkeypatch), Recorder()
    recorder.register("one")
    clock.now += 4.9
    recorder.registry.sweep()
    assert recorder.lost == []
    clock.now += 0.2
    recorder.registry.sweep()
    recorder.registry.sweep()
    assert (recorder.lost, recorder.registry.live()) == (["one"], [])
    assert recorder.registry.update(state("one"))
    assert len(recorder.registry.live()) == 1


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
