"""Which numbers of workers are refused without effect, and which workers start or leave otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config import speculative_config
from deploy.slots import Node, Slot, make_slots, rescale, room, wanted_bundles
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.kv_events import KvEventsConfig
from protocol.roles import ROLES, WorkerRange
from router.scaling.interface import ScaleAnswer, ScaleRequest

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
