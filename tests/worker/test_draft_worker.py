"""Draft workers change the speed of tokens, never the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protocol.requests import DraftPlan, EngineRequest
from protocol.sampling import SamplingParams
from protocol.worker_to_worker import (
    DRAFT_LEASE_S,
    DraftedChain,
    DraftFor,
    DraftKey,
    DraftOpening,
    Drafts,
    DraftUpdate,
    MissingTokens,
)
from tests.speculation.small_engine import ask, prompt_of, write_pair
from tests.worker.draft_network import DRAFTER, DecodeSide, DraftSide, Network, plain_tokens, remote_plan
from tests.worker.light_loop import address

Pair = tuple[Path, Path]
OTHER = address("draft-1", "e" * 16)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    write_pair(target, draft)
    return target, draft


@pytest.fixture(scope="module")
def decodes(pair: Pair) -> list[DecodeSide]:
    """Return two decode workers with a fixed number of drafted tokens and their own local drafts."""
    return [DecodeSide(name, *pair, num_speculative_tokens=3) for name in "ab"]


@pytest.fixture(scope="module")
def drafter(pair: Pair) -> DraftSide:
    return DraftSide(pair[1])


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Check that earlier tests have left nothing on the shared workers."""
    for name in {"decodes", "drafter"} & set(request.fixturenames):
        found = request.getfixturevalue(name)
        for side in found if isinstance(found, list) else [found]:
            side.restart()


@dataclass(frozen=True)
class Drafted:
    """A request of one decode worker, its draft worker `drafter`, and the network between them."""

    request: EngineRequest
    decode: DecodeSide
    drafter: DraftSide
    network: Network
    target: Path

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.network.turn()

    def finish(self) -> None:
        """Run to the end, and check that the tokens equal those without drafts."""
        self.network.run()
        assert self.decode.tokens() == plain_tokens(self.target, [self.request])


@pytest.fixture
def begin(pair: Pair, decodes: list[DecodeSide], drafter: DraftSide) -> Callable[..., Drafted]:
    def begin(num_tokens: int) -> Drafted:
        request = ask("a", prompt_of(25), num_tokens, ignore_eos=True)
        decodes[0].generate(request, remote_plan())
        return Drafted(request, decodes[0], drafter, Network(decodes[:1], [drafter]), pair[0])

    return begin


def is_empty(side: DecodeSide | DraftSide) -> bool:
    return side.engine.blocks.available == side.engine.blocks.num_blocks


def test_the_plan_of_a_running_request_changes(
    pair: Pair, decodes: list[DecodeSide], drafter: DraftSide
) -> None:
    """Nowhere, remote, local, another draft worker, a lower limit there, the worker's choice, nowhere."""
    decode, other = decodes[0], DraftSide(pair[1], OTHER)
    network = Network([decode], [drafter, other])
    request = ask("a", prompt_of(25), 160, temperature=0.5, seed=1, ignore_eos=True)
    nobody, local = DraftPlan(), DraftPlan(method="draft_model")
    decode.generate(request, nobody)
    ways = ["", "remote", "draft_model", "remote", "remote", "draft_model", ""]
    plans = [None, remote_plan(), local, remote_plan(OTHER), remote_plan(OTHER, 2), None, nobody]
    drafted: list[str] = []
    for place, plan in enumerate(plans):
        if place > 0:
            decode.replan("a", plan)
        before = {way: decode.drafted(way) for way in ("remote", "draft_model")}
        for _ in range(6):
            network.turn()
        drafted.append("".join(way for way, count in before.items() if decode.drafted(way) > count))
    assert drafted == ways
    network.run()
    assert decode.tokens() == plain_tokens(pair[0], [request])
    assert other.counter("draft_requests_opened_total") == 1  # the lower limit opens no request again
    network.settle()
    assert len(drafter.loop.requests) + len(other.loop.requests) == 0


def test_a_plan_without_its_draft_worker_decodes_plainly(pair: Pair, decodes: list[DecodeSide]) -> None:
    requests = [ask("a", prompt_of(25), 30, ignore_eos=True)]
    decodes[0].generate(requests[0], remote_plan())
    Network(decodes, []).run()
    assert decodes[0].tokens() == plain_tokens(pair[0], requests)
    assert decodes[0].num_steps == 30
    assert decodes[0].drafted("remote") == 0


def test_a_frozen_draft_worker_costs_only_its_drafts_and_is_used_again(begin: Callable[..., Drafted]) -> None:
    one = begin(200)
    decode, drafter, network = one.decode, one.drafter, one.network
    one.turn(8)
    assert decode.accepted("remote") > 0
    network.frozen.add(DRAFTER.incarnation)
    one.turn(1)
    at_freeze, had = decode.num_steps, decode.num_tokens
    one.turn(10)
    assert decode.num_steps == at_freeze + 10  # it never waits
    assert decode.num_tokens >= had + 10
    now = time.monotonic()
    decode.loop.expire(now + 5)
    assert decode.counter("draft_workers_lost_total") == 1
    network.frozen.clear()
    drafter.restart()  # it has lost its state, and sends nothing by itself
    before = decode.drafted("remote")
    one.turn(1)
    assert len(drafter.loop.requests) == 0  # it gets no messages while it counts as lost
    decode.loop.expire(now + 7)
    one.turn(6)
    assert decode.drafted("remote") > before
    one.finish()
    assert decode.counter("draft_workers_lost_total") == 1


def test_a_draft_worker_slower_than_its_target_delays_no_token(begin: Callable[..., Drafted]) -> None:
    """It runs one step in three of its target's, which therefore has often generated more than it drafted."""
    slow = begin(60)
    for turn in range(60):
        slow.network.turn(drafts_per_step=int(turn % 3 == 0))
    assert len(slow.decode.tokens()["a"]) == 60, "each step brings a token or more"
    assert slow.drafter.counter("drafts_overtaken_total") > 5
    slow.finish()


def test_late_messages_of_a_lost_decode_worker_reopen_nothing(
    decodes: list[DecodeSide], drafter: DraftSide
) -> None:
    """They have not been read yet when the loss is reported."""
    lost, inbox = decodes[0], drafter.light.inbox
    network = Network(decodes, [drafter])
    lost.generate(ask("a", prompt_of(25), 80, ignore_eos=True), remote_plan())
    for _ in range(5):
        network.turn()
    lost.generate(ask("b", prompt_of(25, 1), 80, ignore_eos=True), remote_plan())
    for _ in range(2):
        lost.step()
    inbox.arrived = [(lost.identity, message) for _, message in lost.light.peers.sent]
    drafter.tell_gone(address("a", lost.incarnation))
    drafter.loop.handle({inbox.socket: 1})
    assert drafter.counter("draft_requests_opened_total") == 2
    assert not list(drafter.loop.requests)
    assert is_empty(drafter)


def test_a_preempted_request_continues_with_the_same_drafts(pair: Pair, drafter: DraftSide) -> None:
    decode = DecodeSide("c", *pair, num_blocks=20, num_speculative_tokens=3)
    requests = [ask(f"{i}", prompt_of(40, i), 60, ignore_eos=True) for i in range(4)]
    for request in requests:
        decode.generate(request, remote_plan())
    Network([decode], [drafter]).run()
    assert decode.engine.stats().num_preemptions > 0
    assert decode.tokens() == plain_tokens(pair[0], requests)
    assert drafter.counter("draft_requests_opened_total") == 4


def test_a_leaving_decode_worker_reports_its_last_ends(begin: Callable[..., Drafted]) -> None:
    one = begin(100)
    one.turn(5)
    one.decode.loop.abort("a")
    one.decode.loop.close()
    one.network.carry()
    assert len(one.drafter.loop.requests) == 0


@pytest.mark.parametrize("how", ["its end is lost", "it is frozen until that counts as lost"])
def test_unheard_ends_are_repeated(begin: Callable[..., Drafted], how: str) -> None:
    one = begin(100)
    one.turn(5)
    if how == "its end is lost":
        one.decode.loop.abort("a")
        one.decode.loop.expire(time.monotonic())
        one.decode.light.peers.sent.clear()
    else:
        one.network.frozen.add(DRAFTER.incarnation)
        one.turn(1)
        one.decode.loop.expire(time.monotonic() + 5)
        assert one.decode.counter("draft_workers_lost_total") == 1
        one.decode.loop.abort("a")
        one.network.frozen.clear()
    assert len(one.drafter.loop.requests) == 1
    one.decode.loop.expire(time.monotonic() + 7)
    one.turn(1)
    assert len(one.drafter.loop.requests) == 0
    one.decode.loop.expire(time.monotonic() + 7)
    assert not one.decode.loop.peers_in_use()


def test_a_lost_draft_worker_hears_of_ended_requests_for_a_while(begin: Callable[..., Drafted]) -> None:
    one = begin(100)
    one.turn(5)
    one.network.frozen.add(DRAFTER.incarnation)
    one.decode.loop.abort("a")
    one.decode.loop.expire(time.monotonic() + DRAFT_LEASE_S - 1)
    assert one.decode.loop.peers_in_use()
    one.decode.loop.expire(time.monotonic() + DRAFT_LEASE_S + 1)
    assert not one.decode.loop.peers_in_use()
    assert one.decode.counter("draft_workers_lost_total") == 0


# --- invalid messages ---------------------------------------------------------------------------------


TARGET = b"decode-9:" + b"9" * 16


def opening(num_prompt: int = 20, max_tokens: int = 50, **sampling: Any) -> DraftOpening:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return DraftOpening(sampling=params, num_prompt=num_prompt)


def given(request_id: str = "a", **fields: Any) -> DraftUpdate:
    usual: dict[str, Any] = {"epoch": 1, "start": 0, "token_ids": prompt_of(20), "num_wanted": 5}
    return DraftUpdate(request_id=request_id, **({"opening": opening()} | usual | fields))


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (given(token_ids=[300] * 20), "refused"),
        (given(opening=opening(num_prompt=30)), "refused"),
        (given(opening=opening(max_tokens=50000)), "refused"),
        (given(opening=opening(top_p=-1)), "refused"),
        (given(token_ids=[1] * 1100), "refused"),
        (given(start=7), "behind"),
        (given(opening=None), "behind"),
    ],
)
def test_impossible_messages_of_targets_are_refused(
    drafter: DraftSide, message: DraftUpdate, answer: str
) -> None:
    drafter.loop.on_peer_request(TARGET, DraftFor(incarnation=DRAFTER.incarnation, number=1, given=[message]))
    drafter.loop.handle({})
    for _ in range(3):
        drafter.step()
    replies = [reply for _, reply in drafter.light.inbox.replies]
    assert any(getattr(reply, answer) for reply in replies)
    assert len(drafter.loop.requests) == 0
    assert is_empty(drafter)


def test_a_draft_worker_drops_stale_messages(drafter: DraftSide) -> None:
    loop = drafter.loop

    def tell(number: int, incarnation: str = DRAFTER.incarnation, **news: Any) -> None:
        loop.on_peer_request(TARGET, DraftFor(incarnation=incarnation, number=number, **news))

    tell(1, "0" * 16, given=[given()])
    assert len(loop.requests) == 0
    tell(2, given=[given(epoch=5)])
    tell(3, given=[given(epoch=4)])
    tell(4, ended=[DraftKey("a", 4), DraftKey("unknown", 5)])
    assert [request.key.epoch for request in loop.requests] == [5]
    assert drafter.counter("stale_messages_total") == 2
    tell(3, ended=[DraftKey("a", 5)])
    assert len(loop.requests) == 1
    tell(6, ended=[DraftKey("a", 5)])
    for number in (5, 6):
        tell(number, given=[given(epoch=5)])
    assert len(loop.requests) == 0
    assert drafter.counter("duplicate_messages_total") == 3


def test_a_decode_worker_drops_impossible_messages_of_draft_workers(begin: Callable[..., Drafted]) -> None:
    one = begin(60)
    decode = one.decode
    one.turn(3)
    epoch = decode.loop._drafts._orders["a"].epoch
    length = len(decode.remote.requests["a"].sequence.token_ids)
    chains = [
        DraftedChain("a", epoch, length, [300]),
        DraftedChain("a", epoch, length + 9, [1] * 20),
        DraftedChain("a", epoch, 0, [1] * 20),
        DraftedChain("a", epoch - 1, length, [1, 2]),
        DraftedChain("b", epoch, length, [1, 2]),
        DraftedChain("a", epoch, length, []),
    ]
    missing = [MissingTokens("a", epoch, 2**40), MissingTokens("a", epoch - 1, 0), MissingTokens("c", 1, 0)]
    stale, late = decode.counter("remote_drafts_stale_total"), decode.counter("remote_drafts_late_total")
    for incarnation in (DRAFTER.incarnation, "0" * 16):
        message = Drafts(
            incarnation=incarnation, number=0, chains=chains, behind=missing, refused=[DraftKey("c", 1)]
        )
        decode.loop.on_peer_reply(DRAFTER, message)
    decode.loop.on_peer_reply(OTHER, Drafts(incarnation=OTHER.incarnation, number=0, chains=chains))
    assert decode.counter("stale_messages_total") == 2
    assert decode.counter("dropped_messages_total") == 1
    assert decode.counter("remote_drafts_stale_total") == stale + 4
    assert decode.counter("remote_drafts_late_total") == late + 1
    one.finish()
