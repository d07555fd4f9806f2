"""Every message in every stage of a request on a prefill worker, with a real engine, without sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.engine import Engine
from kvtransfer.interface import Completed, Failed, Sent
from prefill_worker.loop import PrefillLoop
from prefill_worker.request import PrefillRequest, PrefillStage
from protocol.handoff import Extent
from protocol.ids import PeerAddress
from protocol.requests import EngineRequest
from protocol.router_to_worker import Abort, Redirect
from protocol.speculation import SpeculativeConfig
from protocol.worker_to_router import HandoverFailed
from protocol.worker_to_worker import (
    ANY_LEASE,
    Handoff,
    HandoffAck,
    PeerReply,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Stale,
)
from tests.worker.light_loop import OURS, STALE, LightLoop, address, ask, small_engine, walk

NUM_BLOCKS = 12
PROMPTS = {"short": range(1, 21), "long": range(1, 101), "other": range(50, 100), "ends": range(60, 75)}
"""`ends` is over with its first token. There is no room for all, and `long` takes several chunks."""
DECODES = [address("decode-0", "d" * 16), address("decode-0", "e" * 16)]
"""A decode worker, and its successor after a restart."""
UNREACHABLE = address("decode-2", "f" * 16)
NAMES = st.sampled_from(list(PROMPTS))
MOSTLY = st.sampled_from([True, True, True, True, False])


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    return small_engine(model_folder, NUM_BLOCKS, max_num_batched_tokens=48)


@pytest.fixture
def light(engine: Engine) -> Iterator[LightLoop]:
    light = LightLoop(PrefillLoop, engine, "prefill")
    light.sender.unreachable.add(UNREACHABLE.incarnation)
    yield light
    light.finish()
    assert engine.blocks.available == NUM_BLOCKS


def prompt_request(name: str) -> EngineRequest:
    return ask(name, PROMPTS[name], max_tokens=1 if name == "ends" else 4)


def completed(lease_id: str) -> Completed:
    return Completed(lease_id, transport="tcp", nbytes=1, num_extents=1)


def grant(name: str, lease_id: str, cached: int = 0, missing: int = 0) -> Reserved:
    blocks = list(range(-(-len(PROMPTS[name]) // 16) - missing))
    return Reserved(
        request_id=name,
        lease_id=lease_id,
        incarnation="d" * 16,
        block_size=16,
        extents=[Extent(0, blocks)],
        covered=16 * min(cached, len(blocks)),
    )


class PrefillStages(RuleBasedStateMachine):
    """The possible actions of a router, two decode workers and the transports, in any order."""

    engine: Engine

    @initialize()
    def start(self) -> None:
        assert self.engine.blocks.available == NUM_BLOCKS
        self.light = LightLoop(PrefillLoop, self.engine, "prefill")
        self.light.sender.unreachable.add(UNREACHABLE.incarnation)
        self.num_leases = 0
        self.seen: dict[PrefillRequest, None] = {}
        self.withdrawn: set[PrefillRequest] = set()
        self.handed_over: set[PrefillRequest] = set()
        self.unknown = 0

    # --- the router -------------------------------------------------------------------------------

    @rule(name=NAMES, decode=st.sampled_from([None, *DECODES, *DECODES, UNREACHABLE]))
    def generate(self, name: str, decode: Any) -> None:
        self.light.generate(prompt_request(name), decode)
        assert self.light.loop.knows(name)

    @rule(name=NAMES)
    def abort(self, name: str) -> None:
        before = self.light.table.get(name)
        self.light.hear(Abort(request_ids=[name]))
        assert name not in self.light.table
        if before is not None:
            self.withdrawn.add(before)

    @rule(name=NAMES, decode=st.sampled_from([None, *DECODES, *DECODES, UNREACHABLE]), fresh=MOSTLY)
    def redirect(self, name: str, decode: Any, fresh: bool) -> None:
        self.unknown += fresh and not self.light.loop.knows(name)
        incarnation = OURS if fresh else STALE
        self.light.hear(Redirect(incarnation=incarnation, request_id=name, decode=decode))
        self.light.flush()

    # --- the decode workers -----------------------------------------------------------------------

    @rule(name=NAMES, fits=MOSTLY, cached=st.integers(0, 2), same=st.booleans(), peer=st.booleans())
    def reserved(self, name: str, fits: bool, cached: int, same: bool, peer: bool) -> None:
        request = self.light.table.get(name)
        self.num_leases += 1
        lease = f"lease-{self.num_leases}"
        if same and request is not None and request.lease_id is not None:
            lease = request.lease_id
        self.reply(name, grant(name, lease, cached, missing=not fits), peer)

    @rule(name=NAMES, kind=st.sampled_from(["overloaded", "transfer", "invalid"]), peer=st.booleans())
    def refused(self, name: str, kind: Any, peer: bool) -> None:
        self.reply(name, ReserveRefused(request_id=name, error_kind=kind, reason="no"), peer)

    @rule(name=NAMES, peer=st.booleans())
    def stale(self, name: str, peer: bool) -> None:
        self.reply(name, Stale(request_id=name, incarnation="9" * 16), peer)

    @rule(name=NAMES, error=st.sampled_from([None, None, None, "no"]), right=MOSTLY, peer=MOSTLY)
    def acknowledged(self, name: str, error: str | None, right: bool, peer: bool) -> None:
        request = self.light.table.get(name)
        lease = request.lease_id if request is not None and right else None
        ack = HandoffAck(request_id=name, lease_id=lease or "unknown", error=error)
        sent = request is not None and request.stage is PrefillStage.SENT
        self.reply(name, ack, peer)
        if sent and lease and peer and error is None:
            self.handed_over.add(request)
            assert request.stage in (PrefillStage.SETTLING, PrefillStage.ENDED)

    def reply(self, name: str, reply: PeerReply, peer: bool) -> None:
        """Deliver a reply of the request's own decode worker if `peer`, else of another one."""
        request = self.light.table.get(name)
        own = request.peer if request is not None and request.peer is not None else DECODES[0]
        other = DECODES[0] if own is DECODES[1] else DECODES[1]
        state = (request.stage, request.lease_id) if request is not None else None
        self.light.loop.on_peer_reply(own if peer else other, reply)
        self.light.flush()
        if request is not None and not peer:
            assert (request.stage, request.lease_id) == state, "another decode worker's reply changes nothing"

    # --- the transports ---------------------------------------------------------------------------

    @precondition(lambda self: self.light.sender.read)
    @rule(data=st.data(), event=st.sampled_from(["sent", "completed", "completed", "failed"]))
    def a_push_goes_on(self, data: st.DataObject, event: str) -> None:
        sender = self.light.sender
        lease = data.draw(st.sampled_from(list(sender.read)))
        match event:
            case "sent":
                sender.tell(Sent(lease, 1))
            case "completed" if lease in sender.final:
                sender.tell(completed(lease))
            case "failed":
                sender.tell(Failed(lease, "the peer is gone"))

    # --- the loop ---------------------------------------------------------------------------------

    @rule()
    def deliver(self) -> None:
        self.light.deliver()

    @rule()
    def step(self) -> None:
        self.light.step()

    @rule(seconds=st.sampled_from([2.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.light.loop.expire(time.monotonic() + seconds)
        self.light.flush()

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def note(self) -> None:
        for request in self.light.requests:
            self.seen[request] = None

    @invariant()
    def no_block_is_freed_while_it_may_be_read(self) -> None:
        for lease, blocks in self.light.sender.read.items():
            request = self.light.table.with_lease(lease)
            assert request is not None
            assert set(blocks) <= set(self.engine.computed(request.request_id)[0].blocks)

    @invariant()
    def every_used_block_is_the_engines(self) -> None:
        assert self.light.used_blocks() == self.light.computing_blocks()
        assert set(self.engine.sequences) == {each.request_id for each in self.light.requests}

    @invariant()
    def the_stage_says_what_is_held(self) -> None:
        for request in self.light.requests:
            assert request.stage is not PrefillStage.ENDED
            has_lease = request.stage in (PrefillStage.PUSHING, PrefillStage.SENT, PrefillStage.SETTLING)
            assert (request.lease_id is not None) == (request.grant is not None) == has_lease
            assert (request.deadline is None) == (
                request.stage in (PrefillStage.WHOLE, PrefillStage.ASSIGNED)
            )
            assert (request.peer is None) == (request.stage is PrefillStage.WHOLE)
            assert (request in self.light.loop._pushing.values()) == (request.stage is PrefillStage.PUSHING)
            if request.stage in (PrefillStage.SENT, PrefillStage.SETTLING):
                assert request.first_token is not None

    @invariant()
    def who_was_asked_is_told(self) -> None:
        """Check that each decode worker's last message tells it correctly whether to continue."""
        last: dict[tuple[str, str], Any] = {}
        for peer, message in self.light.peers.sent:
            match message:
                case Reserve():
                    last[peer.incarnation, message.request.request_id] = message
                case Release():
                    last[peer.incarnation, message.request_id] = message
                case Handoff():
                    last[peer.incarnation, message.manifest.request_id] = message
        asked = {(each.decode.incarnation, each.request_id) for each in self.light.requests if each.has_asked}
        assert asked <= {key for key, message in last.items() if not isinstance(message, Release)}

    def teardown(self) -> None:
        if not hasattr(self, "light"):
            return
        self.light.finish(self.note)
        assert self.engine.blocks.available == NUM_BLOCKS, "blocks leaked"
        assert not self.light.requests and not self.light.loop._pushing and not self.light.sender.read
        assert all(request.stage is PrefillStage.ENDED for request in self.seen)
        unanswered = self.withdrawn | self.handed_over
        ends = sum(self.light.num_ends(name) for name in PROMPTS)
        assert ends == self.unknown + sum(each not in unanswered for each in self.seen)


@pytest.mark.parametrize(
    ("prefill", "left"), [("carry", [False, False]), ("rebuild", [True, True]), ("auto", [False, True])]
)
def test_the_option_says_who_computes_a_prompts_draft_kv(
    light: LightLoop, prefill: Any, left: list[bool]
) -> None:
    """Or the loop chooses: while a prompt waits here and none runs there, the decode worker."""
    speculative = SpeculativeConfig(method="draft_model", model="a draft", prefill=prefill)
    light.loop.config = replace(light.loop.config, speculative_config=speculative)
    names = ["short", "other"]
    for name in names:
        light.generate(prompt_request(name), DECODES[0])
    assert [light.engine.sequences[name].drafts_elsewhere for name in names] == left
    light.hear(Abort(request_ids=names))


def test_every_message_in_every_stage(engine: Engine) -> None:
    PrefillStages.engine = engine
    walk(PrefillStages)


def test_blocks_are_reserved_before_the_prompt_is_computed(
    light: LightLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker answers during the computation."""
    runner, asked = light.engine._runner, []
    forward = runner.run

    def run(*args: Any, **options: Any) -> Any:
        asked.append([type(message) for _, message in light.peers.sent])
        return forward(*args, **options)

    monkeypatch.setattr(runner, "run", run)
    light.generate(prompt_request("short"), DECODES[0])
    assert not light.peers.sent, "before it is scheduled"
    light.step()
    assert asked == [[Reserve]]


def test_the_first_token_waits_for_no_grant(light: LightLoop) -> None:
    begin(light)
    assert [len(output.token_ids) for output in light.router.outputs] == [1]


def test_a_long_prompt_renews_its_lease(light: LightLoop) -> None:
    """The deadline of its own worker must not pass while the engine computes."""
    begin(light, "long", granted=True)
    request = light.table.get("long")
    before = request.renew_at
    light.loop.expire(before)
    assert request.stage is PrefillStage.PUSHING and request.renew_at > before
    assert [type(message) for _, message in light.peers.sent] == [Reserve, Reserve]


def test_without_another_decode_workers_name_a_request_fails_in_time(light: LightLoop) -> None:
    """The news got lost, so the router is to place the request anew."""
    light.generate(prompt_request("short"), UNREACHABLE)
    light.pass_deadlines()
    [output] = light.router.outputs
    assert output.error_kind == "transfer" and "--handoff-timeout" in output.error


def begin(light: LightLoop, name: str = "short", granted: bool = False) -> None:
    """Compute the prompt for the first decode worker, which grants blocks if `granted`."""
    light.generate(prompt_request(name), DECODES[0])
    light.step()
    if granted:
        light.loop.on_peer_reply(DECODES[0], grant(name, "lease"))


def acknowledge(light: LightLoop, name: str = "short", lease_id: str = "lease", **error: str) -> None:
    light.loop.on_peer_reply(DECODES[0], HandoffAck(request_id=name, lease_id=lease_id, **error))
    light.flush()


def releases(light: LightLoop) -> list[tuple[PeerAddress, str]]:
    """Return the decode workers and leases that were told to end."""
    return [(peer, message.lease_id) for peer, message in light.peers.sent if isinstance(message, Release)]


def assert_goes_on(light: LightLoop, kind: str, text: str, *, manifest_sent: bool = False) -> None:
    """Check that the router is asked for another decode worker, or that this one decodes itself."""
    [failure] = light.router.messages
    assert isinstance(failure, HandoverFailed)
    assert (failure.error_kind, failure.manifest_sent) == (kind, manifest_sent)
    assert text in failure.reason and failure.decode_incarnation == DECODES[0].incarnation
    light.hear(Redirect(incarnation=OURS, request_id="short", decode=None))
    light.run()
    assert sum(len(output.token_ids) for output in light.router.outputs) == 4
    assert not light.requests and light.engine.blocks.available == NUM_BLOCKS


def test_a_finishing_request_may_be_placed_here_again(light: LightLoop) -> None:
    begin(light, granted=True)
    acknowledge(light)
    light.generate(prompt_request("short"))
    light.run()
    assert [output.error for output in light.router.outputs if output.finish_reason is not None] == [None]


def test_a_request_sent_twice_runs_once(light: LightLoop) -> None:
    begin(light)
    light.generate(prompt_request("short"), DECODES[0])
    light.run()
    assert [type(message) for _, message in light.peers.sent] == [Reserve]
    assert light.loop.counters["duplicate_messages_total"] == 1
    assert len(light.router.outputs) == 1


def test_a_message_for_another_incarnation_changes_nothing(light: LightLoop) -> None:
    light.generate(prompt_request("short"), DECODES[0], incarnation=STALE)
    assert not light.loop.knows("short") and not light.engine.has_work()
    [output] = light.router.outputs
    assert (output.error_kind, output.finish_reason) == ("worker_lost", "error")
    light.generate(prompt_request("short"), DECODES[0])
    light.hear(Redirect(incarnation=STALE, request_id="short", decode=None))
    assert light.table.get("short").stage is PrefillStage.ASSIGNED
    assert light.loop.counters["stale_messages_total"] == 2


BAD_ANSWERS: dict[str, tuple[PeerReply, str, str]] = {
    "refused": (
        ReserveRefused(request_id="short", error_kind="overloaded", reason="full up"),
        "overloaded",
        "full up",
    ),
    "stale": (Stale(request_id="short", incarnation="0" * 16), "worker_lost", "restarted"),
    "too few blocks": (grant("short", "lease", missing=1), "transfer", "[(0, 1)]"),
    "unknown block pool": (
        msgspec.structs.replace(grant("short", "lease"), extents=[Extent(0, [1, 2]), Extent(1, [1])]),
        "transfer",
        "(1, 1)",
    ),
    "too many cached": (
        msgspec.structs.replace(grant("short", "lease"), covered=48),
        "transfer",
        "48 tokens covered",
    ),
}


@pytest.mark.parametrize(("answer", "kind", "text"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_bad_answers_fail_the_hand_off(light: LightLoop, answer: PeerReply, kind: str, text: str) -> None:
    begin(light)
    light.loop.on_peer_reply(DECODES[0], answer)
    assert_goes_on(light, kind, text)


def test_an_invalid_request_is_not_sent_elsewhere(light: LightLoop) -> None:
    begin(light)
    refusal = ReserveRefused(request_id="short", error_kind="invalid", reason="too long")
    light.loop.on_peer_reply(DECODES[0], refusal)
    light.flush()
    end = light.router.outputs[-1]
    assert end.error_kind == "invalid" and "too long" in end.error
    assert not light.router.messages and not light.requests


def test_a_refused_manifest_fails_the_hand_off(light: LightLoop) -> None:
    begin(light, granted=True)
    acknowledge(light, lease_id="other")
    assert light.loop.counters["stale_messages_total"] == 1
    acknowledge(light, error="it does not fit", field="num_tokens")
    assert_goes_on(light, "transfer", "it does not fit", manifest_sent=True)


def test_a_failed_transfer_fails_the_hand_off(light: LightLoop) -> None:
    begin(light, granted=True)
    light.sender.tell(Failed("lease", "the peer is gone"))
    light.deliver()
    assert_goes_on(light, "transfer", "the peer is gone", manifest_sent=True)


@pytest.mark.parametrize("granted", [False, True])
def test_a_silent_decode_worker_is_given_up(light: LightLoop, granted: bool) -> None:
    begin(light, granted=granted)
    light.loop.expire(light.table.get("short").deadline)
    assert releases(light) == [(DECODES[0], "lease" if granted else ANY_LEASE)]
    assert light.loop.counters["handoffs_expired_total"] == 1
    [pair] = light.loop.parts.pairs.snapshot({})
    assert (pair.peer, pair.counters) == ("decode-0", {"kv_transfer_leases_expired_total": 1})
    assert_goes_on(light, "timeout", "--handoff-timeout", manifest_sent=granted)


def test_an_acknowledgement_before_the_manifest_is_stale(light: LightLoop) -> None:
    begin(light, "long", granted=True)
    acknowledge(light, "long")
    assert light.table.get("long").stage is PrefillStage.PUSHING
    assert light.loop.counters["stale_messages_total"] == 1


@pytest.mark.parametrize("granted", [False, True])
def test_an_aborted_request_is_withdrawn_from_its_decode_worker(light: LightLoop, granted: bool) -> None:
    begin(light, granted=granted)
    light.hear(Abort(request_ids=["short"]))
    assert releases(light) == [(DECODES[0], "lease" if granted else ANY_LEASE)]
    light.loop.on_peer_reply(DECODES[0], grant("short", "late"))
    assert releases(light)[1:] == [(DECODES[0], "late")], "a grant after the abort is given back"
