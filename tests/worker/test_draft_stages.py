"""Every message between decode and draft workers in every stage, with real engines, without sockets."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import draft_worker.loop
from decode_worker import drafts
from draft_worker.loop import DraftLoop, share_rows
from draft_worker.request import DraftRequest, DraftStage, name_of
from protocol.codec import encode, peer_reply, peer_request
from protocol.requests import DraftPlan, EngineRequest
from protocol.sampling import SamplingParams
from protocol.worker_to_worker import DRAFT_LEASE_S, DraftFor, DraftKey, DraftOpening
from tests.speculation.small_engine import ask, prompt_of, write_pair
from tests.worker.draft_network import DRAFTER, DecodeSide, DraftSide, plain_tokens, remote_plan
from tests.worker.light_loop import address, walk

PIECE = 24
"""Tokens in one `DraftUpdate`, so that longer prompts take several."""
REQUESTS = {
    "short": ask("short", prompt_of(12), 16, ignore_eos=True),
    "long": ask("long", prompt_of(60, 1), 12, temperature=0.8, seed=3, ignore_eos=True),
    "edited": ask("edited", prompt_of(20, 2), 16, repetition_penalty=1.3, ignore_eos=True),
}
LOCAL = DraftPlan(method="draft_model", max_tokens=4)
PLANS = st.sampled_from([remote_plan(), remote_plan(), remote_plan(max_tokens=1), LOCAL, DraftPlan()])
AT_ONCE = 3
"""The number of the decode worker's requests."""


class Clock:
    """Replaces `time` for both workers: a millisecond passes between two readings."""

    def __init__(self) -> None:
        self._looks = itertools.count(1000)

    def monotonic(self) -> float:
        return next(self._looks) / 1000


clock = Clock()


class DraftStages(RuleBasedStateMachine):
    """The possible actions of a router, the network and time on the two workers, in any order."""

    decode: DecodeSide
    drafter: DraftSide
    expected: dict[str, list[int]]
    seen: Counter[str]
    """Counts over all walks: stages of requests, and counters of the workers."""

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.seed = seed
        self.decode.restart()
        self.drafter.restart()
        self.flying: list[tuple[DecodeSide | DraftSide, bytes]] = []
        self.numbers = itertools.count()
        self.asked: list[str] = []
        self.running: set[str] = set()
        for kind in ("short", "edited"):
            self.generate(kind, remote_plan())

    def kind_of(self, request_id: str) -> str:
        return request_id.partition("-")[0]

    # --- the router -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < AT_ONCE)
    @rule(kind=st.sampled_from(list(REQUESTS)), plan=PLANS)
    def generate(self, kind: str, plan: DraftPlan) -> None:
        request_id = f"{kind}-{next(self.numbers)}"
        self.asked.append(request_id)
        self.decode.generate(msgspec.structs.replace(REQUESTS[kind], request_id=request_id), plan)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), plan=PLANS)
    def replan(self, data: st.DataObject, plan: DraftPlan) -> None:
        self.decode.replan(data.draw(st.sampled_from(sorted(self.running))), plan)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.decode.loop.abort(request_id)
        self.asked.remove(request_id)

    # --- the network ------------------------------------------------------------------------------

    def all_arrive(self) -> None:
        messages, self.flying = self.flying, []
        for message in messages:
            self.deliver(*message)

    @rule(seed=st.integers(0, 2**16))
    def some_arrive(self, seed: int) -> None:
        """Deliver some messages in any order, some twice, some later or never."""
        rng = random.Random(seed)
        messages, self.flying = self.flying, []
        rng.shuffle(messages)
        for message in messages:
            fate = rng.choice(["arrives", "arrives", "arrives", "waits", "comes twice", "is lost"])
            if fate in ("arrives", "comes twice"):
                self.deliver(*message)
            if fate in ("waits", "comes twice"):
                self.flying.append(message)

    def deliver(self, to: DecodeSide | DraftSide, raw: bytes) -> None:
        if isinstance(to, DecodeSide):
            to.loop.on_peer_reply(DRAFTER, peer_reply.decode(raw))
        else:
            message = peer_request.decode(raw)
            assert isinstance(message, DraftFor)
            self.tell(to.loop, message)

    def tell(self, loop: DraftLoop, message: DraftFor) -> None:
        """Deliver a message to the draft worker, and track which requests it ends, reopens or keeps alive."""
        target, before = self.decode.identity, list(loop.requests)
        refused, began = loop.counters["draft_requests_refused_total"], clock.monotonic()
        is_news = target not in loop._newest or message.number > loop._newest[target].number
        loop.on_peer_request(target, message)
        loop.handle({})
        for key, stage in ((request.key, request.stage) for request in before):
            ends = any(end.request_id == key.request_id and end.epoch >= key.epoch for end in message.ended)
            opens = any(one.request_id == key.request_id and one.epoch > key.epoch for one in message.given)
            if loop.counters["draft_requests_refused_total"] == refused:
                assert (stage is DraftStage.ENDED) == (is_news and (ends or opens))
        for given in message.given if is_news else ():
            request = loop.requests.get(name_of(target, given.request_id))
            if request is not None and request.key.epoch == given.epoch:
                assert request.deadline is not None and request.deadline >= began + DRAFT_LEASE_S
        assert all(request.target in loop._reading for request in loop._queue), "nothing is in their way"

    # --- the workers ------------------------------------------------------------------------------

    @rule()
    def decode_step(self) -> None:
        self.decode.step()

    @rule()
    def draft_step(self) -> None:
        self.drafter.step()

    @rule(num_drafts=st.integers(1, 4), seed=st.none() | st.integers(0, 2**16))
    def a_round(self, num_drafts: int, seed: int | None) -> None:
        """Run a step of the decode worker, then some of the draft worker."""
        self.decode.step()
        for number in range(num_drafts):
            self.note()
            if seed is None:
                self.all_arrive()
            else:
                self.some_arrive(seed + number)
            self.note()
            self.drafter.step()

    @rule(seconds=st.sampled_from([0.0, 0.0, 1.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        for side in (self.decode, self.drafter):
            side.loop.expire(clock.monotonic() + seconds)

    @rule(how=st.sampled_from(["a failure", "a lost target", "no news"]))
    def the_draft_worker_lets_go(self, how: str) -> None:
        loop = self.drafter.loop
        match how:
            case "a failure":
                for request in [*loop.requests][-1:]:
                    loop.fail(request.request_id, "internal", "its step failed")
            case "a lost target":  # this target, which was silent; and one that had nothing here
                self.drafter.tell_gone(address("b", "b" * 16))
                self.seen["freed"] += len(loop.requests)
                self.drafter.tell_gone(address("a", self.decode.incarnation))
                assert len(loop.requests) == 0
            case _:
                self.flying.clear()  # no message is in flight for so long
                loop.expire(clock.monotonic() + DRAFT_LEASE_S + 1)

    # --- invariants -----------------------------------------------------------------------------------

    @invariant()
    def note(self) -> None:
        decode, drafter = self.decode.light, self.drafter.light
        self.flying += [(self.drafter, encode(message)) for _, message in decode.peers.sent]
        decode.peers.sent.clear()
        self.flying += [(self.decode, encode(reply)) for _, reply in drafter.inbox.replies]
        drafter.inbox.replies.clear()
        self.running = {request.request_id for request in decode.requests}
        self.seen.update(request.stage.value for request in self.drafter.loop.requests)

    @invariant()
    def tokens_are_those_of_nobody_drafting(self) -> None:
        found = self.decode.tokens()
        for request_id in self.asked:
            tokens, expected = found.get(request_id, []), self.expected[self.kind_of(request_id)]
            assert tokens == expected[: len(tokens)]
            assert request_id in self.running or tokens == expected

    @invariant()
    def the_draft_worker_has_what_was_committed(self) -> None:
        sequences = self.drafter.engine.sequences
        for request in self.drafter.loop.requests:
            kind = self.kind_of(request.key.request_id)
            text = REQUESTS[kind].prompt_token_ids + self.expected[kind]
            assert request.committed == text[: len(request.committed)]
            if request.stage is DraftStage.DRAFTING:
                sequence = sequences[request.request_id]
                assert sequence.token_ids[: sequence.num_given] == request.committed
                assert len(sequence.token_ids) == len(request.committed) + request.num_drafted

    @invariant()
    def the_stage_says_what_is_held(self) -> None:
        loop = self.drafter.loop
        drafting = [request for request in loop.requests if request.stage is DraftStage.DRAFTING]
        assert {request.request_id for request in drafting} == set(self.drafter.engine.sequences)
        queued = {request.request_id for request in loop.requests if request.stage is DraftStage.QUEUED}
        assert queued == {request.request_id for request in loop._queue}
        assert all(request in drafting and not request.is_read for request in loop._reading.values())
        assert sum(not request.is_read for request in drafting) <= 1, "of one target one text is read"
        for request in loop.requests:
            is_arriving = request.stage is DraftStage.ARRIVING
            assert is_arriving or len(request.committed) >= request.opening.num_prompt
            assert not (is_arriving and request.num_wanted)
        assert loop.counters["draft_requests_open"] == len(loop.requests)

    def teardown(self) -> None:
        if not hasattr(self, "flying"):
            return
        self.seen["walks"] += 1
        hows = ["a failure", "a lost target", "no news"]  # random walks rarely reach these situations
        if self.seen["walks"] % 2:  # the last of them finds few requests that still draft
            hows.reverse()
        for how in hows:
            self.a_round(2, None)
            self.note()
            self.the_draft_worker_lets_go(how)
        while self.running:
            self.seed += 10
            self.a_round(2, self.seed)
            self.note()
        self.tokens_are_those_of_nobody_drafting()
        for seconds in (0.0, 10.0, 20.0):
            self.decode.loop.expire(clock.monotonic() + seconds)
            for _ in range(2):
                self.note()
                self.all_arrive()
                self.drafter.step()
        assert not len(self.drafter.loop.requests) and not self.drafter.loop._queue
        client = self.decode.loop._drafts
        assert client is not None and not client._orders
        self.decode.loop.expire(clock.monotonic() + 20)
        assert not client._connections
        assert not self.decode.remote.requests and not self.decode.remote.ended
        speculator: Any = self.decode.engine._speculator
        assert not speculator._requests
        for side in (self.decode, self.drafter):
            assert side.engine.blocks.available == side.engine.blocks.num_blocks, "blocks leaked"
            self.seen.update({name: int(value) for name, value in side.loop.counters.snapshot().items()})
        self.seen["accepted"] += int(self.decode.accepted("remote"))


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[type[DraftStages]]:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    write_pair(target, draft)
    DraftStages.decode = DecodeSide("a", target, draft, num_speculative_tokens=3)
    DraftStages.drafter = DraftSide(draft)
    DraftStages.expected = plain_tokens(target, list(REQUESTS.values()))
    DraftStages.seen = Counter()
    with (
        mock.patch.object(drafts.messages, "MAX_UPDATE_TOKENS", PIECE),
        mock.patch.object(drafts, "time", clock),
        mock.patch.object(draft_worker.loop, "time", clock),
    ):
        yield DraftStages


EVENTS = (
    *(stage.value for stage in (DraftStage.ARRIVING, DraftStage.QUEUED, DraftStage.DRAFTING)),
    "accepted",
    "remote_drafts_stale_total",
    "remote_drafts_late_total",
    "remote_drafts_refused_total",
    "draft_workers_lost_total",
    "draft_requests_expired_total",
    "freed",
    "duplicate_messages_total",
    "drafted_tokens_wrong_total",
)


def test_every_message_in_every_stage(stages: type[DraftStages]) -> None:
    """Some orders of the rules miss a rare event, so there are up to three walks."""
    for _ in range(3):
        walk(stages)
        missed = [event for event in EVENTS if not stages.seen[event]]
        if not missed:
            break
    assert missed == []


def request(target: str, number: int, num_drafted: int = 0) -> DraftRequest:
    sampling = SamplingParams(max_tokens=10)
    return DraftRequest(
        EngineRequest(request_id=f"{target}/{number}", prompt_token_ids=[1], sampling=sampling),
        DraftStage.DRAFTING,
        target.encode(),
        DraftKey(str(number), 1),
        DraftOpening(sampling=sampling, num_prompt=1),
        num_drafted=num_drafted,
    )


def test_rows_are_shared_among_targets_and_not_among_requests() -> None:
    large = [request("large", number) for number in range(32)]
    small = [request("small", 0)]
    for num_rows in (2, 8, 33):
        shares = Counter(each.target for each in share_rows([*large, *small], num_rows))
        assert shares == {b"small": 1, b"large": num_rows - 1}
    others = [request(name, number) for name in "abc" for number in range(9)]
    assert Counter(each.target for each in share_rows(others, 12)) == {b"a": 4, b"b": 4, b"c": 4}


def test_the_shortest_drafts_of_a_target_come_first() -> None:
    requests = [request("a", number, num_drafted) for number, num_drafted in enumerate((3, 0, 2, 1))]
    assert [each.num_drafted for each in share_rows(requests, 3)] == [0, 1, 2]
