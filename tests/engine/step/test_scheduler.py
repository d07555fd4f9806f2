"""Preemption and admission by the scheduler, without a model."""

from __future__ import annotations

import time

import pytest

from engine.kv.block_manager import BlockManager
from engine.step.scheduler import ScheduledStep, Scheduler
from engine.step.sequence import SequenceStage, SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.engine.fake_pool import FakePool

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int, budget: int = 64) -> Scheduler:
    return Scheduler(
        BlockManager(FakePool(BLOCK_SIZE, num_blocks)),
        model="m",
        kv_format="f",
        max_num_seqs=8,
        max_num_batched_tokens=budget,
    )


def add(
    scheduler: Scheduler, order: int, length: int, *, priority: int = 0, prefill_only: bool = False
) -> SequenceState:
    request = EngineRequest(
        request_id=f"r{order}",
        prompt_token_ids=[order * 1000 + place for place in range(length)],
        sampling=SamplingParams(max_tokens=1000),
        priority=priority,
    )
    sequence = SequenceState(request, order, prefill_only)
    scheduler.add_waiting(sequence)
    return sequence


def step(scheduler: Scheduler) -> ScheduledStep:
    """Schedule, and act as if the forward had run."""
    scheduled = scheduler.schedule()
    for sequence, count in zip(scheduled.sequences, scheduled.num_tokens, strict=True):
        sequence.num_computed += count
        if sequence.num_uncomputed == 0:
            sequence.append(7)
    return scheduled


def step_until_preempted(scheduler: Scheduler) -> None:
    for _ in range(50):
        step(scheduler)
        if scheduler.num_preemptions:
            return
    raise AssertionError("the blocks do not run out")


@pytest.mark.parametrize(("priorities", "goes"), [((0, 0), 1), ((0, 1), 1), ((-1, 0), 1), ((5, 0), 0)])
def test_the_sequence_that_would_run_last_is_preempted(priorities: tuple[int, int], goes: int) -> None:
    """The younger one, or an older one of lower priority."""
    scheduler = make_scheduler(num_blocks=7)
    both = [add(scheduler, order, 8, priority=priority) for order, priority in enumerate(priorities)]
    gone, stays = both[goes], both[1 - goes]
    gone.prompt_logprobs.append(None)
    step_until_preempted(scheduler)
    assert scheduler.running == [stays] and scheduler.waiting == [gone]
    assert gone.sequence_blocks is None and gone.num_computed == 0 and not gone.prompt_logprobs


def test_a_prompt_that_is_handed_over_is_never_preempted() -> None:
    """Its blocks may be in transfer. The other one has to wait, though it is older."""
    scheduler = make_scheduler(num_blocks=11, budget=2)
    old = add(scheduler, 0, 8)
    handed_over = add(scheduler, 1, 24, prefill_only=True)
    while handed_over.stage is SequenceStage.WAITING:
        step(scheduler)
    blocks = list(handed_over.held.blocks[0])
    step_until_preempted(scheduler)
    assert handed_over.stage is SequenceStage.RUNNING, "it is still being computed"
    assert handed_over.held.blocks == [blocks]
    assert scheduler.waiting == [old]


@pytest.mark.parametrize(("num_blocks", "admitted"), [(5, 1), (6, 2)])
def test_a_newcomer_leaves_a_block_for_each_running_sequence(num_blocks: int, admitted: int) -> None:
    """Otherwise a running sequence's next token would preempt the newcomer at once."""
    scheduler = make_scheduler(num_blocks)
    add(scheduler, 0, 8)
    step(scheduler)
    add(scheduler, 1, 8)
    step(scheduler)
    assert len(scheduler.running) == admitted


def test_the_wait_for_blocks_is_counted_until_a_request_gets_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    scheduler = make_scheduler(num_blocks=5)
    first = add(scheduler, 0, 12)
    step(scheduler)
    assert scheduler.room_wait_s == 0
    waits = add(scheduler, 1, 12)
    for _ in range(2):
        step(scheduler)
        now[0] += 3.0
    assert scheduler.room_wait_s == 6.0
    scheduler.remove(first)
    scheduler.free(first)
    step(scheduler)
    now[0] += 1.0
    assert waits in scheduler.running and scheduler.room_wait_s == 6.0
