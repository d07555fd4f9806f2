"""In any order of events, no token is lost or doubled, and no load stays counted.

The router's own parts, connected as by `RouterState`, run against miniature workers. The test delivers
messages of both directions, so a dead worker's messages may come late, and some get lost.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.codec import encode, router_to_worker
from protocol.config import ServeConfig
from protocol.ids import PeerAddress, new_incarnation
from protocol.outputs import ErrorKind, FinishReason, TokenOutput
from protocol.roles import ROLES
from protocol.router_to_worker import Abort, CallRoll, Generate, Leave, Prefetch, PrepareToLeave, Redirect
from protocol.sampling import SamplingParams
from protocol.worker_to_router import (
    AbsentRequests,
    HandoverFailed,
    Leaving,
    Prefetched,
    StepOutput,
    WorkerState,
)
from router.dispatch.races import ASK_AFTER_S
from router.errors import ApiError
from router.requests.journal import Generation
from router.state import RouterState
from router.text.choice import Choice, Prompt
from tests.router.placed import registration

IDS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
LOSABLE = (Generate, Abort, CallRoll, Redirect, StepOutput, HandoverFailed, AbsentRequests)
"""Messages that decide a request's fate."""
KINDS = ("worker_lost", "transfer", "overloaded", "timeout")
SETTLING_ROUNDS = 400


def script(prompt: list[int], position: int) -> int:
    return (prompt[0] * 31 + position) % 500 + 1


@dataclass
class Job:
    message: Generate
    sent: int = 0
    is_held: bool = False
    """Its hand-over failed, and the worker waits for the router's decision."""

    @property
    def is_done(self) -> bool:
        request = self.message.request
        return len(request.output_token_ids) + self.sent >= request.sampling.max_tokens

    def emit(self, count: int) -> TokenOutput:
        request = self.message.request
        start = len(request.output_token_ids) + self.sent
        stop = min(start + count, request.sampling.max_tokens)
        self.sent += stop - start
        tokens = [script(request.prompt_token_ids, position) for position in range(start, stop)]
        reason: FinishReason | None = "length" if self.is_done else None
        return TokenOutput(
            request_id=request.request_id, token_ids=tokens, position=start, finish_reason=reason
        )


@dataclass(eq=False)
class MiniWorker:
    worker_id: str
    role: str
    incarnation: str = field(default_factory=new_incarnation)
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    jobs: dict[str, Job] = field(default_factory=dict)
    is_reachable: bool = True

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(worker_id=self.worker_id, incarnation=self.incarnation, control="tcp://x:1")

    def tell(self, kind: Any, **fields: Any) -> None:
        self.outbox.append(kind(worker_id=self.worker_id, incarnation=self.incarnation, **fields))

    def say(self, output: TokenOutput) -> None:
        self.tell(StepOutput, outputs=[output])

    def fail(self, request_id: str, kind: ErrorKind) -> None:
        self.say(TokenOutput(request_id=request_id, token_ids=[], finish_reason="error", error_kind=kind))

    def state(self) -> WorkerState:
        return WorkerState(worker_id=self.worker_id, incarnation=self.incarnation, role=self.role)


class World:
    def __init__(self, policy: str) -> None:
        config = ServeConfig(placement=policy, max_queued_requests=20, generation_config="vllm")
        link = mock.Mock(send=self.send)
        with (
            mock.patch("router.state.WorkerLink", return_value=link),
            mock.patch("router.state.Tokenizer.load"),
        ):
            keys: Any = None
            self.state = RouterState(config, keys)
        self.state.registry.expected = {worker_id: worker_id.partition("-")[0] for worker_id in IDS}
        self.loop = asyncio.new_event_loop()
        self.workers: dict[str, MiniWorker] = {}
        self.dead: list[MiniWorker] = []
        self.generations: list[Generation] = []
        self.num_roll_calls = 0
        for worker_id in IDS:
            self.start(worker_id)

    def run(self, action: Callable[[], Any]) -> None:
        async def act() -> None:
            done = action()
            if inspect.isawaitable(done):
                await done

        self.loop.run_until_complete(act())

    def hear(self, message: Any) -> None:
        self.run(lambda: self.state._on_message(message))

    def send(self, worker: Any, message: Any) -> bool:
        target = self.workers.get(worker.key.worker_id)
        if target is None or target.incarnation != worker.key.incarnation or not target.is_reachable:
            return False
        target.inbox.append(router_to_worker.decode(encode(message)))
        return True

    # --- workers ----------------------------------------------------------------------------------

    def start(self, worker_id: str, role: str | None = None, incarnation: str | None = None) -> None:
        worker = MiniWorker(worker_id, role or worker_id.partition("-")[0], incarnation or new_incarnation())
        self.workers[worker_id] = worker
        self.hear(
            registration(worker_id, worker.incarnation, worker.role, max_model_len=1000, vocab_size=600)
        )

    def die(self, worker: MiniWorker, told: bool) -> None:
        del self.workers[worker.worker_id]
        self.dead.append(worker)
        if told:
            registry = self.state.registry
            self.run(lambda: registry.mark_dead(worker.worker_id, worker.incarnation, "it was killed"))

    def deliver(self, worker: MiniWorker, complete: bool = True) -> None:
        """Deliver one message of the router."""
        message = worker.inbox.popleft()
        match message:
            case Generate():
                worker.jobs[message.request.request_id] = Job(message)
            case Abort():
                for request_id in message.request_ids:
                    worker.jobs.pop(request_id, None)
            case CallRoll():
                absent = [each for each in message.request_ids if each not in worker.jobs]
                worker.tell(AbsentRequests, request_ids=absent)
            case Redirect():
                self._redirect(worker, message)
            case Prefetch():
                worker.tell(Prefetched, request_id=message.request.request_id, complete=complete)
            case PrepareToLeave():
                worker.next = (message.role, message.next_incarnation)  # type: ignore[attr-defined]
            case Leave():
                self._leave(worker)

    def _leave(self, worker: MiniWorker) -> None:
        assert not any(self.state.journal.get(request_id) for request_id in worker.jobs)
        del self.workers[worker.worker_id]
        self.dead.append(worker)
        role, incarnation = getattr(worker, "next", (None, None))
        self.start(worker.worker_id, role, incarnation)

    def _redirect(self, worker: MiniWorker, message: Redirect) -> None:
        job = worker.jobs.get(message.request_id)
        if job is None:
            worker.fail(message.request_id, "worker_lost")
            return
        job.message = _with_decode(job.message, message.decode)
        job.is_held = False
        if job.sent and message.decode is not None:
            self.hand_over(worker, job, None)

    def step(self, worker: MiniWorker, count: int, refusal: str | None = None) -> None:
        """Give each of the worker's requests `count` tokens. Finished prompts are handed over, or refused."""
        for request_id, job in list(worker.jobs.items()):
            if job.is_held:
                continue
            if job.message.decode is None:
                worker.say(job.emit(count))
            elif not job.sent:
                worker.say(job.emit(1))
                if not job.is_done:
                    self.hand_over(worker, job, refusal)
            if job.is_done:
                worker.jobs.pop(request_id, None)

    def hand_over(self, worker: MiniWorker, job: Job, refusal: str | None) -> None:
        assert job.message.decode is not None
        decode = self.workers.get(job.message.decode.worker_id)
        is_there = decode is not None and decode.incarnation == job.message.decode.incarnation
        if refusal is None and is_there:
            assert decode is not None
            del worker.jobs[job.message.request.request_id]
            decode.jobs[job.message.request.request_id] = Job(_with_decode(job.message, None), job.sent)
            return
        job.is_held = True
        why = {"error_kind": refusal or "worker_lost", "reason": "it did not work"}
        decode_incarnation, request_id = job.message.decode.incarnation, job.message.request.request_id
        worker.tell(HandoverFailed, request_id=request_id, decode_incarnation=decode_incarnation, **why)

    def give_up_what_is_held(self, worker: MiniWorker) -> None:
        """Let held requests expire without the router's decision, as if a message were lost."""
        for request_id in [request_id for request_id, job in worker.jobs.items() if job.is_held]:
            del worker.jobs[request_id]
            worker.fail(request_id, "transfer")

    def call_roll(self) -> None:
        self.num_roll_calls += 1
        later = 2 * ASK_AFTER_S * self.num_roll_calls
        self.run(lambda: self.state.roll_call.sweep(time.monotonic() + later))

    # --- invariants -------------------------------------------------------------------------------------

    def check(self) -> None:
        for generation in self.generations:
            for request in generation.requests:
                prompt, tokens = request.choice.prompt.token_ids, request.output_token_ids
                assert tokens == [script(prompt, position) for position in range(len(tokens))]
                if request.choice.finish_reason is not None and generation.error is None:
                    assert len(tokens) == request.sampling.max_tokens
        live = [at for _, at in self.state.journal.assigned()]
        for worker in self.state.registry:
            mine = [at for at in live if worker in at.holders]
            rows = [at for at in live if at.decode is worker]
            prompts = [at for at in live if at.waits_at is worker]
            assert worker.outstanding_requests == len(mine)
            assert worker.outstanding_rows == len(rows)
            assert worker.outstanding_context == sum(at.num_tokens for at in rows)
            computed = [at.num_uncached for at in live if at.first is worker]
            assert worker.outstanding_computed == len(computed)
            assert worker.outstanding_computed_tokens == sum(computed)
            assert worker.outstanding_prompts == len(prompts)
            assert worker.outstanding_prefill_tokens == sum(at.num_uncached for at in prompts)
            assert worker.num_decoding == sum(at.decode is worker and at.is_decoding for at in live)
        journal = self.state.journal
        for owner, copy in journal.copies.items():
            assert copy.owner is owner and owner.owner is None and copy not in owner.generation.requests
            assert journal.get(owner.request_id) is owner and journal.get(copy.request_id) is copy

    def settle(self) -> None:
        """Deliver everything without further faults. All requests end and nothing is left."""
        for worker_id in IDS:
            worker = self.workers.get(worker_id)
            if worker is None:
                self.start(worker_id)
            else:
                worker.is_reachable = True
                self.hear(worker.state())
        self.run(lambda: self.state.registry.sweep(time.monotonic()))
        for _ in range(SETTLING_ROUNDS):
            self.call_roll()
            for worker in list(self.workers.values()):
                while worker.inbox and self.workers.get(worker.worker_id) is worker:
                    self.deliver(worker)
                self.step(worker, 5)
                self.hear(worker.state())
            for worker in [*self.dead, *self.workers.values()]:
                while worker.outbox:
                    self.hear(worker.outbox.popleft())
            if not any(worker.inbox for worker in self.workers.values()):
                for worker in self.workers.values():
                    self.give_up_what_is_held(worker)
            self.run(self.state.dispatcher.resume_parked)
            self.run(self.state.drainer.sweep)
            self.check()
            if all(each.is_over for each in self.generations) and not self._under_way():
                break
        assert all(generation.is_over for generation in self.generations)
        assert not self._under_way()
        assert not len(self.state.journal)
        assert not self.state.placer.num_parked
        assert not any(worker.outstanding_requests for worker in self.state.registry)

    def _under_way(self) -> bool:
        return any(worker.jobs or worker.inbox or worker.outbox for worker in self.workers.values())


def _with_decode(message: Generate, decode: PeerAddress | None) -> Generate:
    return Generate(incarnation=message.incarnation, request=message.request, decode=decode)


class Interleaving(RuleBasedStateMachine):
    policy = "least_loaded"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.policy)

    def _worker(self, index: int) -> MiniWorker:
        workers = list(self.world.workers.values())
        return workers[index % len(workers)]

    @rule(prompt=st.integers(1, 16), tokens=st.integers(1, 12), n=st.integers(1, 2))
    def arrive(self, prompt: int, tokens: int, n: int) -> None:
        world, now = self.world, time.monotonic()
        choices = [
            (Choice(index, Prompt([prompt] * 20), _NoText()), SamplingParams(max_tokens=tokens))
            for index in range(n)
        ]
        generation = Generation(choices, arrival=now, timeout_s=600.0)
        world.generations.append(generation)

        async def start() -> None:
            try:
                await world.state.dispatcher.start(generation)
            except ApiError:
                assert generation.is_over

        world.run(start)

    @precondition(lambda self: self.world.workers)
    @rule(
        index=st.integers(0, 4), count=st.integers(1, 3), refusal=st.sampled_from([None, None, None, *KINDS])
    )
    def step(self, index: int, count: int, refusal: str | None) -> None:
        self.world.step(self._worker(index), count, refusal)

    @rule(index=st.integers(0, 4), number=st.integers(1, 4), complete=st.booleans())
    def deliver(self, index: int, number: int, complete: bool) -> None:
        worker = self._worker(index) if self.world.workers else None
        for _ in range(number):
            if worker is not None and worker.inbox and self.world.workers.get(worker.worker_id) is worker:
                self.world.deliver(worker, complete)

    @rule(index=st.integers(0, 9), number=st.integers(1, 4))
    def hear(self, index: int, number: int) -> None:
        """Deliver a worker's message, even if the worker is dead."""
        speakers = [worker for worker in [*self.world.workers.values(), *self.world.dead] if worker.outbox]
        for _ in range(number):
            if speakers and speakers[index % len(speakers)].outbox:
                self.world.hear(speakers[index % len(speakers)].outbox.popleft())

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4), told=st.booleans())
    def die(self, index: int, told: bool) -> None:
        self.world.die(self._worker(index), told)

    @rule(index=st.integers(0, 4))
    def restart(self, index: int) -> None:
        if IDS[index] not in self.world.workers:
            self.world.start(IDS[index])

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4), freezes=st.booleans())
    def fall_silent(self, index: int, freezes: bool) -> None:
        """Let a worker be silent until it counts as dead. Without `freezes`, only its connection is lost."""
        worker = self._worker(index)
        known = self.world.state.registry.current(worker.worker_id, worker.incarnation)
        if not freezes:
            worker.is_reachable = False
        elif known is not None:
            known.silence_s = 100.0
            self.world.run(lambda: self.world.state.registry.sweep(time.monotonic()))

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4), is_suspect=st.booleans())
    def suspect(self, index: int, is_suspect: bool) -> None:
        """Suspect a worker, whose requests race then, or no longer."""
        worker, registry = self._worker(index), self.world.state.registry
        known = registry.current(worker.worker_id, worker.incarnation)
        if known is not None:
            known.is_suspect = is_suspect
            registry.changed(known)
            self.world.run(lambda: self.world.state.dispatcher.races.sweep(time.monotonic()))

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4))
    def speak_again(self, index: int) -> None:
        worker = self._worker(index)
        worker.is_reachable = True
        self.world.hear(worker.state())

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4), role=st.sampled_from([None, "prefill", "decode"]), operator=st.booleans())
    def drain(self, index: int, role: str | None, operator: bool) -> None:
        worker, drainer = self._worker(index), self.world.state.drainer

        async def act() -> None:
            try:
                if role is None:
                    await drainer.drain(worker.worker_id)
                else:
                    await drainer.change_role(worker.worker_id, ROLES[role])
            except ApiError:
                return

        if operator:
            self.world.run(act)
        else:
            self.world.hear(Leaving(worker_id=worker.worker_id, incarnation=worker.incarnation))

    @rule(late=st.booleans())
    def sweep(self, late: bool) -> None:
        """Let the router sweep. With `late`, every drain is past its deadline."""
        drainer = self.world.state.drainer
        for drain in drainer._drains.values():
            drain.began -= 1000.0 * late
        self.world.run(drainer.sweep)
        self.world.run(self.world.state.dispatcher.resume_parked)

    @precondition(lambda self: self.world.generations)
    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        generation = self.world.generations[index % len(self.world.generations)]
        self.world.run(lambda: self.world.state.dispatcher.cancel(generation))

    @precondition(lambda self: self.world.workers)
    @rule(index=st.integers(0, 4), kind=st.sampled_from(["worker_lost", "transfer", "internal"]))
    def fail(self, index: int, kind: ErrorKind) -> None:
        worker = self._worker(index)
        if worker.jobs:
            request_id = next(iter(worker.jobs))
            del worker.jobs[request_id]
            worker.fail(request_id, kind)

    @rule(index=st.integers(0, 9), sent=st.booleans())
    def lose(self, index: int, sent: bool) -> None:
        """Lose a message together with its connection."""
        ways = [w.inbox if sent else w.outbox for w in [*self.world.workers.values(), *self.world.dead]]
        ways = [way for way in ways if way and isinstance(way[0], LOSABLE)]
        if ways:
            ways[index % len(ways)].popleft()

    @rule()
    def call_roll(self) -> None:
        self.world.call_roll()

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.settle()
        finally:
            self.world.loop.close()


class _NoText:
    """A detokenizer without text, since the test only checks tokens."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("policy", ["least_loaded", "cost"])
def test_any_interleaving(policy: str) -> None:
    machine = type("Interleaving", (Interleaving,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_silent_request_is_asked_for_once_in_a_while():
    world = World("least_loaded")
    choice = Choice(0, Prompt([1] * 20), _NoText())
    choices = [(choice, SamplingParams(max_tokens=5))]
    generation = Generation(choices, arrival=time.monotonic(), timeout_s=600.0)
    world.run(lambda: world.state.dispatcher.start(generation))
    (request,) = generation.requests
    silent_since = request.last_message_at + ASK_AFTER_S
    asked = []
    for number in range(1, 12):
        world.run(lambda at=silent_since + 0.3 * number: world.state.roll_call.sweep(at))
        inbox = world.workers[request.assignment.worker.key.worker_id].inbox
        asked += [number for message in inbox if isinstance(message, CallRoll)]
        inbox.clear()
    assert asked == [1, 5, 9]
