"""Both sides of a prefix fetch without sockets: the fate of the blocks, however the fetch ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from decode_worker.loop import DecodeLoop
from engine.engine import Engine
from engine.kv.prefix_cache import hold_blocks
from kvtransfer.interface import Arrival, Completed, Failed, Progress
from protocol.ids import block_identities
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import Abort, Replan
from protocol.worker_to_worker import Fetch, FetchGranted, FetchRefused
from tests.e2e.architectures import write_model
from tests.worker.light_loop import OURS, STALE, LightLoop, address, ask, small_engine

NUM_BLOCKS = 12
HOLDER = address("prefill-1", "b" * 16)
PROMPT = range(1, 71)
NUM_FULL = len(PROMPT) // 16


@pytest.fixture
def engine(model_folder: Path) -> Engine:
    return small_engine(model_folder, NUM_BLOCKS)


@pytest.fixture
def light(engine: Engine) -> Iterator[LightLoop]:
    light = LightLoop(DecodeLoop, engine, "decode")
    yield light
    light.finish()
    assert engine.blocks.available == NUM_BLOCKS


def request() -> EngineRequest:
    return ask("r", PROMPT)


def fetch(light: LightLoop) -> str:
    """Ask the holder. Return the lease."""
    light.generate(request(), prefix=HOLDER)
    [(peer, message)] = light.peers.sent
    assert peer == HOLDER and isinstance(message, Fetch)
    assert len(message.identities) == NUM_FULL
    return message.lease_id


def arrival(foreign_formats: frozenset[str] = frozenset()) -> Arrival:
    return Arrival(
        0.0, "tcp", nbytes=1, seconds=0.1, exposed_s=0.0, wait_s=0.0, foreign_formats=foreign_formats
    )


def cached_tokens(light: LightLoop) -> int | None:
    """Run the request to its end. Return how much of its prompt was cached."""
    light.run()
    assert light.num_ends("r") == 1
    return next(output.cached_tokens for output in light.router.outputs)


@pytest.mark.parametrize("num_held", [0, 3])
def test_fetched_blocks_are_cached(light: LightLoop, num_held: int) -> None:
    lease = fetch(light)
    light.receiver.tell(Progress(lease, num_held, complete=True, arrival=arrival()))
    light.deliver()
    assert cached_tokens(light) == num_held * 16
    assert light.loop.counters["prefix_fetch_failures_total"] == 0


def test_arriving_blocks_extend_the_deadline(light: LightLoop) -> None:
    lease, fetcher = fetch(light), light.loop._fetcher
    [waiting] = fetcher.fetches
    asked_until = waiting.deadline
    light.receiver.tell(Progress(lease, 1, complete=False))
    light.deliver()
    fetcher.expire(asked_until)
    assert len(fetcher.fetches) == 1
    fetcher.expire(waiting.deadline)
    assert not len(fetcher.fetches) and light.loop.counters["prefix_fetch_failures_total"] == 1


def test_a_plan_that_changes_during_the_fetch_is_kept(light: LightLoop, engine: Engine) -> None:
    lease, plan = fetch(light), DraftPlan(method="ngram", max_tokens=2)
    light.hear(Replan(incarnation=OURS, request_id="r", plan=plan))
    light.receiver.tell(Progress(lease, 3, complete=True, arrival=arrival()))
    light.deliver()
    assert engine.sequences["r"].draft_plan == plan
    assert cached_tokens(light) == 3 * 16


def test_without_room_the_prompt_waits_like_any_other(light: LightLoop) -> None:
    light.generate(ask("big", range(100, 210), max_tokens=12))
    light.generate(ask("small", range(200, 220), max_tokens=12))
    for _ in range(3):
        light.step()
    light.generate(request(), prefix=HOLDER)
    assert not light.peers.sent
    assert cached_tokens(light) == 0 and light.num_ends("big") == 1


def test_values_changed_by_the_transport_are_not_used(light: LightLoop) -> None:
    lease = fetch(light)
    changed = arrival(frozenset({"float32 through int8"}))
    light.receiver.tell(Progress(lease, NUM_FULL, complete=True, arrival=changed))
    light.deliver()
    assert cached_tokens(light) == 0
    assert light.loop.counters["prefix_fetch_failures_total"] == 1


@pytest.mark.parametrize("how", ["abort", "fails", "time"])
def test_blocks_wait_for_the_last_write(light: LightLoop, how: str) -> None:
    lease = fetch(light)
    light.receiver.begin_write(lease)
    match how:
        case "abort":
            light.hear(Abort(request_ids=["r"]))
        case "fails":
            light.receiver.tell(Failed(lease, "gone"))
            light.deliver()
        case "time":
            light.loop._fetcher.expire(1e12)
    if how != "abort":
        assert cached_tokens(light) == 0
    assert not set(light.receiver.written[lease]) & light.computing_blocks()
    assert len(light.used_blocks()) == NUM_FULL
    light.receiver.end_write(lease)
    light.deliver()
    assert not light.used_blocks() and not len(light.loop._fetcher.fetches)
    assert light.loop.counters["prefix_fetch_failures_total"] == (how != "abort")


def lend(light: LightLoop, engine: Engine, incarnation: str = OURS) -> None:
    root = engine.scheduler.root(request())
    message = Fetch(
        incarnation=incarnation,
        request_id="theirs",
        lease_id="lease",
        first_block=0,
        identities=list(block_identities(root, list(PROMPT), 16)),
        receiver=HOLDER,
    )
    light.loop._on_fetch(b"asker", message)


@pytest.mark.parametrize("how", ["completed", "failed"])
def test_lent_blocks_are_returned(light: LightLoop, engine: Engine, how: str) -> None:
    light.generate(request())
    light.run()
    lend(light, engine)
    assert len(light.used_blocks()) == NUM_FULL and light.sender.final == {"lease"}
    lend(light, engine)
    assert light.loop.counters["duplicate_messages_total"] == 1
    if how == "failed":
        light.sender.tell(Failed("lease", "gone"))
    else:
        light.sender.tell(Completed("lease", "tcp", 1, 1))
    light.deliver()
    assert not light.used_blocks() and not light.loop._holder._lent


@pytest.mark.parametrize("come_first", ["blocks", "answer"])
def test_the_drafts_kv_is_fetched_too(light: LightLoop, engine: Engine, come_first: str) -> None:
    """Nothing is used before it is known which blocks hold it."""
    fetcher, drafted = light.loop._fetcher, engine.blocks.drafted
    fetcher._needs_lent = True
    lease = fetch(light)
    [waiting] = fetcher.fetches
    blocks = waiting.room.sequence_blocks.blocks[0][:NUM_FULL]
    blocks_came = Progress(lease, NUM_FULL, complete=True, arrival=arrival())
    answer = FetchGranted(request_id="r", lease_id=lease, num_drafted=2, num_found=NUM_FULL)
    if come_first == "blocks":
        light.receiver.tell(blocks_came)
        light.deliver()
        assert len(fetcher.fetches) == 1
        fetcher.on_lent(answer)
    else:
        fetcher.on_lent(answer)
        light.receiver.tell(blocks_came)
        light.deliver()
    assert not len(fetcher.fetches)
    assert [drafted[block] for block in blocks] == [True, True] + [False] * (NUM_FULL - 2)
    assert cached_tokens(light) == NUM_FULL * 16


def test_the_holder_reports_which_blocks_hold_the_drafts_kv(light: LightLoop, engine: Engine) -> None:
    light.generate(request())
    light.run()
    with_draft = hold_blocks(
        engine.blocks, list(block_identities(engine.scheduler.root(request()), list(PROMPT), 16))
    )
    with_draft.mark_drafted(3 * 16)
    with_draft.free()
    lend(light, engine)
    [(_, answer)] = light.inbox.replies
    assert answer == FetchGranted(request_id="theirs", lease_id="lease", num_drafted=3, num_found=NUM_FULL)
    light.sender.tell(Completed("lease", "tcp", 1, 1))
    light.deliver()


def test_another_incarnation_lends_nothing(light: LightLoop, engine: Engine) -> None:
    lend(light, engine, STALE)
    [(_, refused)] = light.inbox.replies
    assert isinstance(refused, FetchRefused) and "restarted" in refused.reason
    assert not light.sender.final


def test_nothing_is_lent_over_a_wire_that_quantizes(
    light: LightLoop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetched prefix must equal a computed one bit by bit."""
    monkeypatch.setattr(light.sender, "wire_dtype", lambda peer: "int8")
    lend(light, engine)
    [(_, refused)] = light.inbox.replies
    assert isinstance(refused, FetchRefused) and "quantizes" in refused.reason
    assert not light.sender.final


@pytest.mark.parametrize(("told", "found"), [(6, 96), (5, 0), (7, 0)])
@pytest.mark.parametrize("come_first", ["blocks", "answer"])
def test_with_a_window_the_holder_reports_which_blocks_come(
    tmp_path: Path, come_first: str, told: int, found: int
) -> None:
    """Two of six blocks come: the first four are not needed. Nothing is used before this is known."""
    write_model("mistral", tmp_path)
    light = LightLoop(DecodeLoop, small_engine(tmp_path, 2 * NUM_BLOCKS), "decode")
    light.generate(ask("r", range(1, 111)), prefix=HOLDER)
    [(_, message)] = light.peers.sent
    assert isinstance(message, Fetch)
    assert (message.first_block, len(message.identities)) == (0, 6)
    blocks_came = Progress(message.lease_id, 2, complete=True, arrival=arrival())
    answer = FetchGranted(request_id="r", lease_id=message.lease_id, num_drafted=0, num_found=told)
    if come_first == "blocks":
        light.receiver.tell(blocks_came)
        light.deliver()
        assert len(light.loop._fetcher.fetches) == 1
    light.loop._fetcher.on_lent(answer)
    if come_first == "answer":
        light.receiver.tell(blocks_came)
        light.deliver()
    assert cached_tokens(light) == found
    assert light.loop.counters["prefix_fetch_failures_total"] == (found == 0)
    light.finish()


def test_no_more_blocks_are_lent_than_requested(light: LightLoop) -> None:
    lease = fetch(light)
    light.loop._fetcher.on_lent(FetchGranted(request_id="r", lease_id=lease, num_drafted=0, num_found=99))
    assert cached_tokens(light) == 0
    assert light.loop.counters["prefix_fetch_failures_total"] == 1
