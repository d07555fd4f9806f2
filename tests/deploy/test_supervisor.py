"""The supervisor restarts, replaces, adds and removes workers."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.config import speculative_config
from deploy.slot_actors import StartFault, StartWatch
from deploy.slots import (
    FRAIL_S,
    LONGEST_BACKOFF_S,
    STABLE_S,
    UNTOLD_S,
    Node,
    Slot,
    let_go,
    make_slots,
    rescale,
    room,
    wanted_bundles,
)
from deploy.supervisor import StartUpError, Supervisor
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.kv_events import KvEventsConfig
from protocol.roles import ROLES, WorkerRange
from router.scaling.interface import ScaleAnswer, ScaleRequest


class Life:
    """A worker's place. Each death is followed by the next start."""

    def __init__(self) -> None:
        self.slot = Slot("decode-0", ROLES["decode"])
        self.now = 100.0

    def die(self, *, vanished: bool, after_s: float | None) -> float:
        """Die `after_s` seconds after being ready, or before. Return the pause until the next start."""
        self.slot.ready_since = self.now if after_s is not None else None
        self.now += after_s or 1.0
        return self.slot.note_death(vanished, self.now)


def test_kills_from_outside_cost_no_pause() -> None:
    life = Life()
    assert [life.die(vanished=True, after_s=7.0) for _ in range(10)] == [0.0] * 10
    assert life.slot.failures == 0


def test_repeated_failures_cost_growing_pauses() -> None:
    life = Life()
    pauses = [life.die(vanished=False, after_s=10.0) for _ in range(10)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_BACKOFF_S] * 3]
    assert life.die(vanished=False, after_s=STABLE_S + 1) == 0.0, "it had recovered"


def test_a_process_that_vanishes_before_or_when_ready_has_failed() -> None:
    life = Life()
    assert [life.die(vanished=True, after_s=after) for after in (1.0, None, 1.0)] == [0.0, 0.5, 1.0]
    assert life.die(vanished=True, after_s=7.0) == 1.0, "a kill adds nothing, and forgives nothing"


def test_only_starts_without_success_count_as_failed_starts() -> None:
    life = Life()
    for vanished, after_s in ((False, 1.0), (True, 1.0), (False, 10.0)):
        life.die(vanished=vanished, after_s=after_s)
        assert life.slot.failed_starts == 0, "requests wait for a worker that serves between its deaths"
    life.die(vanished=True, after_s=None)
    life.die(vanished=False, after_s=None)
    assert life.slot.failed_starts == 2
    life.die(vanished=False, after_s=1.0)
    assert life.slot.failed_starts == 0


def test_a_decode_worker_stays_whichever_leaves_or_changes() -> None:
    slots = make_slots(ServeConfig(prefill_replicas=1, decode_replicas=3))
    refused = "no other decode worker stays"
    assert let_go(slots, "decode-0", for_good=True) == ""
    assert let_go(slots, "decode-0", for_good=True) == "", "who asks again gets the same answer"
    assert "already" in let_go(slots, "decode-0", for_good=False)
    assert let_go(slots, "decode-1", for_good=False) == ""
    assert "already" in let_go(slots, "decode-1", for_good=True)
    assert let_go(slots, "decode-2", for_good=True) == let_go(slots, "decode-2", for_good=False) == refused
    assert let_go(slots, "prefill-0", for_good=True) == ""
    assert let_go(slots, "decode-9", for_good=True) == "it has left already"
    slots[2].changes = False
    slots[2].role = ROLES["prefill"]
    assert let_go(slots, "decode-2", for_good=True) == refused
    assert [(slot.leaves, slot.changes) for slot in slots] == [
        (True, False),
        (True, False),
        (False, False),
        (False, False),
    ]


def supervisor_of_two(expected: list[list[str]]) -> Any:
    """Make a supervisor of two workers without Ray. Its router records the workers that it is to expect."""
    config = ServeConfig(prefill_replicas=0, decode_replicas=2, drain_timeout=3.0)
    supervisor: Any = object.__new__(Supervisor)
    supervisor._config, supervisor._slots = config, make_slots(config)
    supervisor._cluster = SimpleNamespace(is_local=False, may_grow=False)
    supervisor._placing, supervisor._expected = SimpleNamespace(nodes=[]), None
    supervisor._no_room_until = {}
    supervisor._starts = StartWatch(config, False, lambda: None)
    supervisor._stop, supervisor._began = threading.Event(), time.monotonic()
    supervisor._router = SimpleNamespace(
        silence_of=lambda *worker: 0.0, expect=lambda roles, room: expected.append(list(roles))
    )
    return supervisor


def test_a_worker_removed_before_it_served_never_counts_as_ready() -> None:
    """No router drained it, so it must be ended like a starting worker."""
    supervisor = supervisor_of_two([])
    unwanted, wanted = supervisor._slots
    unwanted.leaves, unwanted.let_go_at = True, time.monotonic()
    for slot in supervisor._slots:
        supervisor._look_at(slot, time.monotonic())
    assert unwanted.ready_since is None and wanted.ready_since is not None


def starting() -> tuple[Any, Any, list[str]]:
    """Make a supervisor and a worker that it starts for the first time, with records of its actions."""
    supervisor, done = supervisor_of_two([]), []
    supervisor._actors = SimpleNamespace(
        kill=lambda slot: done.append("killed"), end=lambda slot: done.append("actor ended")
    )
    supervisor._router.mark_dead = lambda *worker: None
    supervisor._router.replaced = done.append
    slot = supervisor._slots[0]
    slot.look = object()
    return supervisor, slot, done


def test_an_actor_that_does_not_answer_is_replaced_at_the_first_start_too() -> None:
    supervisor, slot, done = starting()
    fault = StartFault("its actor has not answered for 10 s", by_actor=True)
    supervisor._end_start(slot, fault, time.monotonic())
    assert done == ["actor", "killed", "worker"]
    assert slot.ping is slot.look, "what it was asked tells that nothing answers there"
    assert slot.start_at is not None
    late = time.monotonic() + supervisor._config.start_timeout
    with pytest.raises(StartUpError, match="worker decode-0 cannot start: its actor has not answered"):
        supervisor._end_start(slot, fault, late)


@pytest.mark.parametrize("added", [False, True])
def test_a_worker_that_is_killed_at_its_first_start_gets_a_second_one(added: bool) -> None:
    """The server may already serve by other workers, whose requests would be lost with it."""
    supervisor, slot, done = starting()
    supervisor._give_up = lambda slot, reason: done.append(reason)
    slot.added_at = time.monotonic() if added else None
    supervisor._on_ended(slot, "killed", vanished=True)
    assert done == ["worker"] and slot.start_at is not None
    if added:
        supervisor._on_ended(slot, "killed", vanished=True)
        assert done == ["worker", "it cannot start: killed"]
    else:
        with pytest.raises(StartUpError, match="worker decode-0 cannot start: killed"):
            supervisor._on_ended(slot, "killed", vanished=True)


@pytest.mark.parametrize("stopped", [False, True])
def test_only_workers_that_fall_silent_by_themselves_wait_longer_each_time(stopped: bool) -> None:
    supervisor, slot, done = starting()
    supervisor._actors.was_stopped = lambda slot: stopped
    slot.actor, slot.was_ready, pauses = SimpleNamespace(look=SimpleNamespace(remote=object)), True, []
    for _ in range(3):
        now = time.monotonic()
        slot.ready_since = now - FRAIL_S - 1
        supervisor._judge_silence(slot, 10.0)
        pauses.append(round(slot.start_at - now, 1))
    assert pauses == ([0.0, 0.0, 0.0] if stopped else [0.0, 0.5, 1.0])
    assert done == ["killed", "worker"] * 3


def test_a_worker_whose_start_takes_too_long_gets_another_actor() -> None:
    """The old actor may wait for something that never comes, and would block the next start."""
    supervisor, slot, done = starting()
    slot.was_ready = True
    supervisor._end_start(slot, StartFault("it was not ready", is_over=True), time.monotonic())
    assert done == ["killed", "actor ended", "worker"]


@pytest.mark.parametrize("for_good", [True, False])
def test_a_worker_whose_removal_was_lost_stays(for_good: bool) -> None:
    """The router that asked for its removal has died, and neither other routers nor the worker know of it."""
    expected: list[list[str]] = []
    supervisor = supervisor_of_two(expected)
    before = time.monotonic()
    assert supervisor._let_go("decode-0", for_good) == ""
    assert expected == [["decode-1"] if for_good else ["decode-0", "decode-1"]]
    slot = supervisor._slots[0]
    slot.ready_since = before
    supervisor._look_at(slot, before + 3 + UNTOLD_S)
    assert let_go(supervisor._slots, "decode-1", for_good=True) == "no other decode worker stays"
    assert supervisor._let_go("decode-0", for_good) == "", "another router asks, and has time to tell it"
    now = time.monotonic()
    supervisor._look_at(slot, now + 3 + UNTOLD_S - 0.1)
    assert slot.leaves or slot.changes
    supervisor._look_at(slot, now + 3 + UNTOLD_S + 0.1)
    assert expected[-1] == ["decode-0", "decode-1"]
    assert let_go(supervisor._slots, "decode-1", for_good=True) == ""
    assert let_go(supervisor._slots, "decode-0", for_good) == "no other decode worker stays"


LAPTOP = [Node("a", "127.0.0.1", 2)]
HOSTS = [
    Node("a", "10.0.0.1", 0),
    Node("b", "10.0.0.2", 8, roles={"prefill": 1, "decode": 1}),
    Node("c", "10.0.0.3", 8, roles={"decode": 2}),
]
DRAFTS = speculative_config('{"method": "draft_model"}', "", str(BUNDLED_MODEL))


def ready(config: ServeConfig) -> list[Slot]:
    slots = make_slots(config)
    for slot in slots:
        slot.ready_since = 1.0
    return slots


def ask(
    slots: list[Slot], config: ServeConfig, nodes: Any = LAPTOP, grow: bool = False, **targets: int
) -> ScaleAnswer:
    worth = sorted(slot.worker_id for slot in slots)
    return rescale(slots, ScaleRequest(targets=targets, worth=worth), config, nodes, grow)


@pytest.mark.parametrize(
    ("options", "nodes", "targets", "field", "reason"),
    [
        ({}, LAPTOP, {"decode": 0}, "decode", "must be at least 1, got 0"),
        ({}, LAPTOP, {"decode": 2, "prefill": 0}, "prefill", "must be at least 1, got 0"),
        ({}, LAPTOP, {"decode": 8}, "decode", "the nodes take at most 7 next to the other workers, got 8"),
        ({}, LAPTOP, {"decode": 7, "prefill": 2}, "decode", "at most 6"),
        ({}, HOSTS, {"prefill": 2}, "prefill", "the nodes take at most 1 next to the other workers, got 2"),
        ({}, HOSTS, {"decode": 4}, "decode", "at most 3"),
        ({"disaggregation": False}, LAPTOP, {"prefill": 1}, "prefill", "must be 0 with --no-disaggregation"),
        ({}, LAPTOP, {"draft": 1}, "draft", "needs --speculative-config with a method that draft workers"),
        ({"speculative_config": DRAFTS}, LAPTOP, {"draft": 1}, "draft", "needs --draft-replicas above 0"),
        (
            {"autoscale": {"decode": WorkerRange(1, 2)}},
            LAPTOP,
            {"decode": 3},
            "decode",
            "within --autoscale 1:2",
        ),
        (
            {"kv_events_config": KvEventsConfig(endpoint="tcp://*:5557")},
            LAPTOP,
            {"decode": 2},
            "decode",
            "ports for 1",
        ),
    ],
)
def test_refused_numbers_change_nothing(options, nodes, targets, field, reason):
    config = ServeConfig(**options)
    slots = ready(config)
    before = list(slots)
    answer = ask(slots, config, nodes, **targets)
    assert (answer.field, reason in answer.refusal) == (field, True), answer
    assert slots == before and not any(slot.leaves for slot in slots)


def test_new_workers_get_the_first_free_names():
    config = ServeConfig(prefill_replicas=2)
    slots = ready(config)
    slots[0].leaves = True
    answer = ask(slots, config, prefill=2, decode=3)
    assert answer == ScaleAnswer(started=["prefill-2", "decode-1", "decode-2"])
    assert [slot.worker_id for slot in slots[3:]] == answer.started
    assert all(slot.start_at == slot.added_at is not None for slot in slots[3:])


def test_a_worker_that_serves_before_the_supervisor_knows_is_drained():
    """It has just started, and only its router knows it. Without a drain it would never leave."""
    config = ServeConfig()
    slots = ready(config)
    assert ask(slots, config, decode=2).started == ["decode-1"]
    request = ScaleRequest(targets={"decode": 1}, worth=["decode-1", "decode-0", "prefill-0"])
    assert rescale(slots, request, config, LAPTOP, False).leaving == ["decode-1"]


def test_workers_that_do_not_serve_leave_first_then_the_least_valuable():
    config = ServeConfig(decode_replicas=4)
    slots = ready(config)
    coming = next(slot for slot in slots if slot.worker_id == "decode-3")
    coming.ready_since = None
    request = ScaleRequest(targets={"decode": 1}, worth=["decode-2", "decode-0", "decode-1"])
    answer = rescale(slots, request, config, LAPTOP, False)
    assert answer.leaving == ["decode-2", "decode-0"], "nothing is to be drained of decode-3"
    assert {slot.worker_id for slot in slots if slot.leaves} == {"decode-0", "decode-2", "decode-3"}
    again = rescale(slots, request, config, LAPTOP, False)
    assert again == ScaleAnswer(), "another router asks for the same"


def test_nothing_scales_while_a_worker_changes_its_role():
    config = ServeConfig(decode_replicas=2)
    slots = ready(config)
    slots[1].changes = True
    assert "decode-0 changes its role" in ask(slots, config, decode=3).refusal


def test_nodes_that_may_come_are_waited_for():
    config = ServeConfig()
    slots = ready(config)
    assert ask(slots, config, HOSTS, grow=True, prefill=3).started == ["prefill-1", "prefill-2"]
    assert wanted_bundles(slots, HOSTS) == [
        {"prefill": 1.0},
        {"decode": 1.0},
        {"prefill": 1.0},
        {"prefill": 1.0},
    ]
    assert wanted_bundles(slots[:1], LAPTOP) == [{"CPU": 1.0}]
    slots[2].leaves = True
    assert len(wanted_bundles(slots, HOSTS)) == 3


def test_a_worker_that_has_changed_its_role_keeps_its_place():
    config = ServeConfig(decode_replicas=3)
    slots = ready(config)
    assert room(slots, config, HOSTS, False) == {"prefill": 0, "decode": 0, "draft": 0}
    slots[3].placed_as, slots[3].role = "decode", ROLES["prefill"]
    assert room(slots, config, HOSTS, False) == {"prefill": 0, "decode": 0, "draft": 0}
    assert "at most 2 next to the other workers, got 3" in ask(slots, config, HOSTS, decode=3).refusal
    assert "at most 2 next to the other workers, got 3" in ask(slots, config, HOSTS, prefill=3).refusal
    assert wanted_bundles(slots, HOSTS) == [{"prefill": 1.0}, *[{"decode": 1.0}] * 3]
    shared = room(ready(config), config, LAPTOP, False)
    assert room(slots, config, LAPTOP, False) == shared


def test_the_remaining_room():
    config = ServeConfig(speculative_config=DRAFTS, draft_replicas=1)
    slots = ready(config)
    assert room(slots, config, LAPTOP, False) == {"prefill": 5, "decode": 5, "draft": 5}
    assert room(slots, config, HOSTS, False) == {"prefill": 0, "decode": 2, "draft": 0}
    assert min(room(slots, config, HOSTS, True).values()) > 1000
    with_gpus = [Node("a", "10.0.0.1", 8, gpus=4), Node("b", "10.0.0.2", 8)]
    assert room(slots, config, with_gpus, False)["decode"] == 1
    assert set(room(slots, config, [], False)) == set(ROLES)
