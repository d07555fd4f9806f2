"""Every message in every stage of a request on a decode worker, with a real engine, without sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_worker.loop import DecodeLoop
from decode_worker.request import DecodeRequest, DecodeStage
from engine.engine import Engine
from kvtransfer.interface import Failed, Progress
from protocol.codec import encode, peer_request
from protocol.handoff import DraftState, Extent, HandoffManifest, SegmentInfo
from protocol.requests import EngineRequest
from protocol.router_to_worker import Abort
from protocol.speculation import SpeculativeConfig
from protocol.worker_to_worker import (
    ANY_LEASE,
    Handoff,
    HandoffAck,
    PeerRequest,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Stale,
)
from tests.worker.light_loop import OURS, STALE, LightLoop, ask, small_engine, walk
from tests.worker.peer_ends import manifest
from tests.worker.tiny_model import VOCAB_SIZE
from worker.requests import IllegalTransitionError

NUM_BLOCKS = 12
PROMPTS = {"short": range(1, 21), "long": range(1, 101), "other": range(50, 100), "again": range(1, 101)}
"""Prompts. `long` and `again` share blocks. There is no room for all at once."""
WORKERS = {"prefill-0": "b" * 16, "prefill-1": "c" * 16}

MOSTLY = st.sampled_from([True, True, True, True, False])


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return small_engine(model_folder, NUM_BLOCKS)


@contextmanager
def decode_loop(engine: Engine) -> Iterator[LightLoop]:
    light = LightLoop(DecodeLoop, engine, "decode")
    try:
        yield light
    finally:  # the next one has the same engine
        light.finish()
    assert engine.blocks.available == NUM_BLOCKS


@pytest.fixture
def light(engine: Engine) -> Iterator[LightLoop]:
    with decode_loop(engine) as light:
        yield light


def identity_of(worker: str) -> bytes:
    return f"{worker}:{WORKERS[worker]}".encode()


def prompt_request(name: str) -> EngineRequest:
    return ask(name, PROMPTS[name])


def reserve_message(engine: Engine, name: str, worker: str, incarnation: str = OURS) -> Reserve:
    return Reserve(
        incarnation=incarnation,
        request=prompt_request(name),
        prefill_worker=worker,
        prefill_incarnation=WORKERS[worker],
        segments=engine.pool.segments,
        ttl_s=10.0,
    )


def missing(grant: Reserved) -> int:
    return len(grant.extents[0].blocks) - grant.covered // grant.block_size


def manifest_of(engine: Engine, grant: Reserved, worker: str) -> HandoffManifest:
    request = prompt_request(grant.request_id)
    return manifest(request, grant, engine.pool.segments, worker, WORKERS[worker], first_token=7)


class DecodeStages(RuleBasedStateMachine):
    """The possible actions of a router, two prefill workers and the transports, in any order."""

    engine: Engine

    @initialize()
    def start(self) -> None:
        assert self.engine.blocks.available == NUM_BLOCKS
        self.light = LightLoop(DecodeLoop, self.engine, "decode")
        self.grants: dict[str, tuple[str, Reserved]] = {}
        """By lease: the worker that got it first, and the grant."""
        self.seen: dict[DecodeRequest, None] = {}
        self.ran: set[DecodeRequest] = set()
        self.leases: dict[DecodeRequest, str] = {}
        self.withdrawn: set[DecodeRequest] = set()
        """Requests that the router or a prefill worker withdrew: nobody waits for their answers."""

    # --- the router -------------------------------------------------------------------------------

    @rule(name=st.sampled_from(list(PROMPTS)))
    def generate(self, name: str) -> None:
        self.light.generate(prompt_request(name))
        assert name in self.light.table

    @rule(name=st.sampled_from(list(PROMPTS)))
    def abort(self, name: str) -> None:
        with self.withdrawing(name):
            self.light.hear(Abort(request_ids=[name]))
        assert name not in self.light.table

    @contextmanager
    def withdrawing(self, name: str) -> Iterator[None]:
        before = self.light.table.get(name)
        yield
        if before is not None and self.light.table.get(name) is not before:
            self.withdrawn.add(before)

    # --- the prefill workers ----------------------------------------------------------------------

    @rule(name=st.sampled_from(list(PROMPTS)), worker=st.sampled_from(list(WORKERS)), fresh=MOSTLY)
    def reserve(self, name: str, worker: str, fresh: bool) -> None:
        incarnation = OURS if fresh else STALE
        with self.withdrawing(name):
            self.say(worker, reserve_message(self.engine, name, worker, incarnation))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), fits=MOSTLY)
    def hand_off(self, data: st.DataObject, fits: bool) -> None:
        worker, grant = self.grants[data.draw(st.sampled_from(list(self.grants)))]
        manifest = manifest_of(self.engine, grant, worker)
        if not fits:
            manifest = msgspec.structs.replace(manifest, num_tokens=1)
        self.say(worker, Handoff(manifest=manifest))

    @rule(
        name=st.sampled_from(list(PROMPTS)),
        worker=st.sampled_from(list(WORKERS)),
        data=st.data(),
        fresh=MOSTLY,
    )
    def release(self, name: str, worker: str, data: st.DataObject, fresh: bool) -> None:
        lease = data.draw(st.sampled_from([ANY_LEASE, *self.grants]))
        if lease in self.grants:
            name = self.grants[lease][1].request_id
        with self.withdrawing(name):
            incarnation = OURS if fresh else STALE
            self.say(worker, Release(incarnation=incarnation, lease_id=lease, request_id=name))

    def say(self, worker: str, message: PeerRequest) -> None:
        self.light.loop.on_peer_request(identity_of(worker), message)

    # --- the transports ---------------------------------------------------------------------------

    @precondition(lambda self: self.light.receiver.open_leases)
    @rule(data=st.data(), event=st.sampled_from(["all", "some", "failed", "write"]))
    def a_lease_is_used(self, data: st.DataObject, event: str) -> None:
        receiver = self.light.receiver
        lease = data.draw(st.sampled_from(list(receiver.open_leases)))
        count = len(receiver.open_leases[lease])
        match event:
            case "all":
                receiver.tell(Progress(lease, count, complete=True))
            case "some":
                receiver.tell(Progress(lease, count - 1))
            case "failed":
                receiver.tell(Failed(lease, "the sender is gone"))
            case "write" if lease not in receiver.written:
                receiver.begin_write(lease)

    @precondition(lambda self: self.light.receiver.written)
    @rule(data=st.data())
    def a_write_ends(self, data: st.DataObject) -> None:
        self.light.receiver.end_write(data.draw(st.sampled_from(list(self.light.receiver.written))))

    # --- the loop ---------------------------------------------------------------------------------

    @rule()
    def deliver(self) -> None:
        self.light.deliver()

    @rule()
    def step(self) -> None:
        self.light.step()

    @rule()
    def time_passes(self) -> None:
        self.light.loop.expire(time.monotonic() + 1000)

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def note(self) -> None:
        for identity, reply in self.light.inbox.replies:
            if isinstance(reply, Reserved) and reply.lease_id not in self.grants:
                self.grants[reply.lease_id] = identity.decode().partition(":")[0], reply
        for request in self.light.requests:
            self.seen[request] = None
            if request.stage is DecodeStage.RUNNING:
                self.ran.add(request)
            if request.lease_id is not None:
                self.leases[request] = request.lease_id

    @invariant()
    def no_block_is_used_while_it_may_be_written(self) -> None:
        blocks, receiver = self.engine.blocks, self.light.receiver
        computing = self.light.computing_blocks()
        for written in (receiver.open_leases | receiver.written).values():
            assert all(blocks._references[block] == 1 for block in written)
            assert all(blocks._entry_of[block] is None for block in written)
            assert not computing & set(written)

    @invariant()
    def every_used_block_has_an_owner(self) -> None:
        owned = self.light.computing_blocks()
        for request in self.light.requests:
            if request.stage in (DecodeStage.RESERVED, DecodeStage.CLOSING, DecodeStage.ABANDONED):
                owned |= set(request.granted.sequence_blocks.blocks[0])
        assert self.light.used_blocks() == owned

    @invariant()
    def the_stage_says_what_is_held(self) -> None:
        for request in self.light.requests:
            assert request.stage is not DecodeStage.ENDED
            handed = request.reserve is not None
            assert (request.lease_id is not None) == (handed and request.stage is not DecodeStage.QUEUED)
            assert (request.deadline is None) == (request.stage is DecodeStage.RUNNING)
            assert (request in self.light.loop._queue) == (request.stage is DecodeStage.QUEUED)
            assert (self.light.table.get(request.request_id) is request) == (
                request.stage is not DecodeStage.ABANDONED
            )
        running = {each.request_id for each in self.light.requests if each.stage is DecodeStage.RUNNING}
        assert running == set(self.engine.sequences)
        reserved = {each.lease_id for each in self.light.requests if each.stage is DecodeStage.RESERVED}
        assert set(self.light.receiver.open_leases) <= reserved

    def teardown(self) -> None:
        if not hasattr(self, "light"):
            return
        self.light.finish(self.note)
        self.note()
        assert self.engine.blocks.available == NUM_BLOCKS, "blocks leaked"
        assert not self.light.requests and not self.light.loop._queue and not self.light.loop._unstepped
        assert all(request.stage is DecodeStage.ENDED for request in self.seen)
        self.every_request_was_answered_once()

    def every_request_was_answered_once(self) -> None:
        replies = [reply for _, reply in self.light.inbox.replies]
        refusals = [reply for reply in replies if isinstance(reply, ReserveRefused)]
        refused = [each.request_id for each in refusals if "runs here already" not in each.reason]
        acks = [reply for reply in replies if isinstance(reply, HandoffAck)]
        acks = [ack for ack in acks if "unknown here" not in (ack.error or "")]
        for name in PROMPTS:
            awaited = [each for each in self.seen if each.request_id == name and each not in self.withdrawn]
            assert self.light.num_ends(name) == sum(each in self.ran for each in awaited)
            assert refused.count(name) == sum(
                each not in self.leases and each not in self.ran for each in awaited
            )
        for request, lease in self.leases.items():
            if request not in self.withdrawn:
                errors = [ack.error for ack in acks if ack.lease_id == lease]
                assert len(set(errors)) == 1 and (errors[0] is None) == (request in self.ran)


def test_every_message_in_every_stage(engine: Engine) -> None:
    DecodeStages.engine = engine
    walk(DecodeStages)


@pytest.mark.parametrize("before", DecodeStage)
def test_only_transitions_of_the_table_are_legal(before: DecodeStage) -> None:
    """The walks through their stages hold the tables of the other roles."""
    for after in DecodeStage:
        request = DecodeRequest(prompt_request("short"), before)
        ends = after is DecodeStage.ENDED and before is not DecodeStage.ENDED
        if ends or after in request.next_stages.get(before, ()):
            request.enter(after)
            assert request.stage is after
        else:
            with pytest.raises(IllegalTransitionError, match=f"{before.name} -> {after.name}"):
                request.enter(after)
            assert request.stage is before


def reserve(light: LightLoop, name: str = "short", worker: str = "prefill-0") -> Reserved:
    light.loop.on_peer_request(identity_of(worker), reserve_message(light.engine, name, worker))
    grant = light.inbox.replies[-1][1]
    assert isinstance(grant, Reserved)
    return grant


def hand_off(light: LightLoop, manifest: HandoffManifest) -> Any:
    """Return the answer, or None if there is none yet."""
    num_replies = len(light.inbox.replies)
    handoff = peer_request.decode(encode(Handoff(manifest=manifest)))
    light.loop.on_peer_request(identity_of("prefill-0"), handoff)
    replies = light.inbox.replies[num_replies:]
    return replies[0][1] if replies else None


def arrive(light: LightLoop, grant: Reserved) -> None:
    light.receiver.tell(Progress(grant.lease_id, missing(grant), complete=True))
    light.deliver()


def queue(light: LightLoop, *names: str) -> None:
    for name in names:
        light.loop.on_peer_request(identity_of("prefill-0"), reserve_message(light.engine, name, "prefill-0"))


def test_reservations_wait_in_order(light: LightLoop) -> None:
    """The short prompt would fit, but must not overtake."""
    grant = reserve(light, "long")
    queue(light, "again", "short")
    assert len(light.inbox.replies) == 1
    release = Release(incarnation=OURS, lease_id=grant.lease_id, request_id="long")
    light.loop.on_peer_request(identity_of("prefill-0"), release)
    light.deliver()
    granted = [reply.request_id for _, reply in light.inbox.replies if isinstance(reply, Reserved)]
    assert granted == ["long", "again", "short"]


def test_a_reservation_that_waits_for_too_long_is_refused(light: LightLoop) -> None:
    reserve(light, "long")
    queue(light, "again")
    light.pass_deadlines()
    (refused,) = [reply for _, reply in light.inbox.replies if isinstance(reply, ReserveRefused)]
    assert (refused.request_id, refused.error_kind) == ("again", "overloaded")


def test_an_impossible_request_is_refused(light: LightLoop) -> None:
    message = reserve_message(light.engine, "long", "prefill-0")
    too_long = msgspec.structs.replace(message, request=ask("long", PROMPTS["long"], max_tokens=100))
    light.loop.on_peer_request(identity_of("prefill-0"), too_long)
    [(_, refused)] = light.inbox.replies
    assert isinstance(refused, ReserveRefused) and refused.error_kind == "invalid"
    assert "max_tokens" in refused.reason and not light.requests


def test_arriving_blocks_renew_the_lease(light: LightLoop, engine: Engine) -> None:
    grant = reserve(light)
    request = light.table.get("short")
    deadlines = [request.deadline]
    assert reserve(light) == grant and len(light.inbox.replies) == 2
    deadlines.append(request.deadline)
    light.receiver.tell(Progress(grant.lease_id, 1, complete=False))
    light.deliver()
    deadlines.append(request.deadline)
    assert hand_off(light, manifest_of(engine, grant, "prefill-0")) is None
    deadlines.append(request.deadline)
    assert deadlines == sorted(set(deadlines))
    light.loop.expire(deadlines[-2])
    assert light.table.get("short") is request
    light.loop.expire(deadlines[-1])
    assert not light.requests
    ack = light.inbox.replies[-1][1]
    assert isinstance(ack, HandoffAck) and "no progress" in (ack.error or "")
    assert light.loop.counters["reservations_expired_total"] == 1
    [pair] = light.loop.parts.pairs.snapshot({})
    assert (pair.peer, pair.counters) == ("prefill-0", {"kv_transfer_leases_expired_total": 1})


def test_only_the_first_release_of_a_lease_counts(light: LightLoop, engine: Engine) -> None:
    """The second release comes when the request is here again under another lease."""
    release = Release(incarnation=OURS, lease_id=reserve(light).lease_id, request_id="short")
    light.loop.on_peer_request(identity_of("prefill-0"), release)
    assert not light.requests and engine.blocks.available == NUM_BLOCKS
    reserve(light)
    light.loop.on_peer_request(identity_of("prefill-0"), release)
    assert light.table.get("short").stage is DecodeStage.RESERVED
    assert light.loop.counters["reservations_released_total"] == 1


def test_the_first_prefill_worker_cannot_release_a_request_that_another_took_over(light: LightLoop) -> None:
    old, grant = reserve(light), reserve(light, worker="prefill-1")
    assert grant.lease_id != old.lease_id
    for lease in (ANY_LEASE, old.lease_id):
        release = Release(incarnation=OURS, lease_id=lease, request_id="short")
        light.loop.on_peer_request(identity_of("prefill-0"), release)
    assert light.table.get("short").lease_id == grant.lease_id


def test_a_request_that_is_aborted_before_its_first_step_is_forgotten(
    light: LightLoop, engine: Engine
) -> None:
    grant = reserve(light)
    arrive(light, grant)
    for _ in range(2):
        acknowledged = HandoffAck(request_id="short", lease_id=grant.lease_id)
        assert hand_off(light, manifest_of(engine, grant, "prefill-0")) == acknowledged
    assert light.loop.counters["duplicate_messages_total"] == 1
    light.hear(Abort(request_ids=["short"]))
    assert not light.requests and not light.loop._unstepped


def test_messages_for_another_incarnation_are_stale(light: LightLoop, engine: Engine) -> None:
    stale = Stale(request_id="short", incarnation=OURS)
    message = reserve_message(engine, "short", "prefill-0", STALE)
    light.loop.on_peer_request(identity_of("prefill-0"), message)
    assert light.inbox.replies == [(identity_of("prefill-0"), stale)]
    assert not light.requests
    right = manifest_of(engine, reserve(light), "prefill-0")
    assert hand_off(light, msgspec.structs.replace(right, decode_incarnation=STALE)) == stale
    assert light.table.get("short").manifest is None
    assert light.loop.counters["stale_messages_total"] == 2


def test_a_running_request_is_not_reserved_for_another_prefill_worker(light: LightLoop) -> None:
    light.generate(prompt_request("short"))
    light.loop.on_peer_request(identity_of("prefill-0"), reserve_message(light.engine, "short", "prefill-0"))
    [(_, refused)] = light.inbox.replies
    assert isinstance(refused, ReserveRefused) and refused.error_kind == "transfer"


CARRIED = DraftState(kind="carried", method="eagle")
OTHER_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "version": st.integers(2, 99),
    "request_id": st.text(max_size=9),
    "lease_id": st.text(max_size=9),
    "prefill_worker": st.text(max_size=9),
    "prefill_incarnation": st.text(max_size=9),
    "num_tokens": st.integers(1, 2**40),
    "token_ids_digest": st.binary(max_size=20),
    "segments": st.lists(
        st.builds(SegmentInfo, name=st.just("target"), dtype=st.text(max_size=9), shape=st.just((2, 2))),
        max_size=16,
    ),
    "state_position": st.integers(0, 2**40),
    "extents": st.lists(
        st.builds(Extent, st.integers(0, 15), st.lists(st.integers(0, 2**30), max_size=4)), max_size=16
    ),
    "pushed_blocks": st.integers(0, 2**40),
    "first_token": st.integers(VOCAB_SIZE, 2**40),
    "first_token_position": st.integers(1, 2**40),
    "sampling.seed": st.integers(-(2**60), 2**60),
    "sampling.num_output_tokens": st.integers(0, 2**40),
    "draft.method": st.text(max_size=9),
    "draft.num_tokens": st.integers(21, 2**31 - 1),
    "draft.feature": st.binary(min_size=1, max_size=99),
    "reserve_s": st.floats(min_value=1e6, allow_infinity=True),
}
"""Invalid values for the fields of a manifest for `short`."""


def leaf_fields(struct: msgspec.Struct, prefix: str = "") -> set[str]:
    leaves = set()
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        leaves |= leaf_fields(value, f"{name}.") if isinstance(value, msgspec.Struct) else {prefix + name}
    return leaves


def changed(manifest: HandoffManifest, field: str, value: Any) -> HandoffManifest:
    outer, _, inner = field.partition(".")
    if inner:
        whole = CARRIED if outer == "draft" else getattr(manifest, outer)
        value = msgspec.structs.replace(whole, **{inner: value})
    return msgspec.structs.replace(manifest, **{outer: value})


def test_every_field_of_a_manifest_is_mutated_below(light: LightLoop, engine: Engine) -> None:
    fields = leaf_fields(manifest_of(engine, reserve(light), "prefill-0"))
    assert fields == OTHER_VALUES.keys() | {"decode_incarnation", "draft.kind"}


@pytest.mark.parametrize("field", OTHER_VALUES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_wrong_field_is_refused_by_name(engine: Engine, field: str, data: st.DataObject) -> None:
    with decode_loop(engine) as light:
        grant = reserve(light)
        arrive(light, grant)
        right = manifest_of(engine, grant, "prefill-0")
        wrong = changed(right, field, data.draw(OTHER_VALUES[field]))
        assume(wrong != right)
        ack = hand_off(light, wrong)
        assert isinstance(ack, HandoffAck) and ack.error
        assert ack.field == ("lease_id" if field == "request_id" else field)
        light.generate(prompt_request("other"))
        light.run()
        assert [output.error for output in light.router.outputs] == [None] * 4


def test_a_draft_longer_than_its_prompt_does_not_fail_a_step(model_folder: Path) -> None:
    speculative = SpeculativeConfig(method="draft_model", model=str(model_folder), num_speculative_tokens=2)
    light = LightLoop(
        DecodeLoop, small_engine(model_folder, 2 * NUM_BLOCKS, speculative_config=speculative), "decode"
    )
    drafts = DraftState(kind="carried", method="draft_model", num_tokens=20)
    for num_tokens, field in ((100000, "draft.num_tokens"), (21, "draft.num_tokens"), (20, None)):
        grant = reserve(light)
        arrive(light, grant)
        draft = msgspec.structs.replace(drafts, num_tokens=num_tokens)
        manifest = msgspec.structs.replace(manifest_of(light.engine, grant, "prefill-0"), draft=draft)
        assert hand_off(light, manifest).field == field
        light.run()
    assert light.num_ends("short") == 1
    assert light.loop.counters["step_failures_total"] == 0
    light.finish()
