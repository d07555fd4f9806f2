"""The router knows which worker holds which prefix, by events, and by an index that equals a plain record."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocol.config import ServeConfig
from protocol.ids import block_identities
from protocol.kv_events import CacheFormat, KvChange, Medium, Window
from protocol.router_to_worker import ReplayKvEvents
from protocol.sampling import SamplingParams
from protocol.worker_to_router import KvEvents, WorkerState
from router.dispatch import Core
from router.dispatch.kv_feed import LATE_S, KvFeed
from router.dispatch.placer import Placer
from router.observe.metrics import Metrics
from router.placement import placement_policy
from router.requests.journal import Generation, Journal, LiveRequest
from router.text.choice import Choice, Prompt
from router.workers import kv_index
from router.workers.kv_index import KvIndex, block_keys
from router.workers.registry import Registry
from tests.router.placed import registration

CACHE = CacheFormat(model="m", kv_format="f", block_size=16)


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def ask(prompt: list[int], salt: str = "", **sampling: Any) -> LiveRequest:
    detokenizer: Any = None
    choice = Choice(0, Prompt(prompt), detokenizer)
    params = SamplingParams(max_tokens=1, **sampling)
    return Generation([(choice, params)], arrival=0.0, timeout_s=1.0, cache_salt=salt).requests[0]


class Router:
    """A router's registry, feed and placer. `sent` records messages to workers."""

    def __init__(self) -> None:
        self.registry = Registry(5.0)
        self.metrics = Metrics("m", self.registry)
        self.sent: list[Any] = []
        core = Core(ServeConfig(), Journal("r"), self.registry, self.metrics, self._send)
        self.feed = KvFeed(core)
        self.registry.on_registered = self.feed.register
        self.placer = Placer(core, placement_policy("least_loaded"), self.feed)
        self.numbers: dict[str, int] = {}

    def _send(self, worker: object, message: msgspec.Struct) -> bool:
        self.sent.append(message)
        return True

    def start(self, *worker_ids: str, incarnation: str = "new", cache: CacheFormat = CACHE) -> None:
        for worker_id in worker_ids:
            told = registration(worker_id, incarnation, cache=cache, max_model_len=1000, vocab_size=1000)
            self.registry.register(told)
            self.tell(worker_id, KvChange("cleared"), incarnation=incarnation, number=0)

    def tell(
        self, worker_id: str, *changes: KvChange, incarnation: str = "new", number: int | None = None
    ) -> None:
        number = self.numbers.get(worker_id, 0) if number is None else number
        self.numbers[worker_id] = number + 1
        self.feed.receive(
            KvEvents(worker_id=worker_id, incarnation=incarnation, sequence=number, changes=list(changes))
        )

    def found(self, prompt: list[int], salt: str = "") -> dict[str, int]:
        return self.feed.cached_tokens(ask(prompt, salt))

    def dropped(self, reason: str) -> float:
        labels = {"reason": reason, "model_name": "m"}
        return self.metrics.registry.get_sample_value("tandem_kv_events_dropped_total", labels) or 0.0


@pytest.fixture
def router() -> Router:
    return Router()


def blocks(
    kind: Any, token_ids: Sequence[int], first: int = 0, *, medium: Medium = Medium.GPU, salt: str = ""
) -> KvChange:
    """Make events for the full blocks of these tokens from `first` on."""
    identities = list(block_identities(CACHE.root(salt), token_ids, CACHE.block_size))
    return KvChange(kind, medium, b"".join(identities[first:]))


def test_the_longest_common_prefix_of_each_worker_is_found(router: Router) -> None:
    router.start("a", "b", "c")
    router.tell("a", blocks("stored", tokens(500)[:200]))
    router.tell("b", blocks("stored", tokens(500)))
    router.tell("c", blocks("stored", tokens(500), medium=Medium.CPU))
    asked = tokens(500)[:400] + tokens(100, seed=1)
    assert router.found(asked) == {"a": 192, "b": 400}
    assert router.found(asked[:250]) == {"a": 192, "b": 240}
    assert router.found(tokens(500, seed=2)) == {}
    assert router.found(asked, "tenant") == {}
    assert router.found(asked[:15]) == {}
    router.tell("a", blocks("stored", tokens(500), salt="tenant"))
    assert router.found(asked, "tenant") == {"a": 400}


def test_generated_tokens_count_when_a_request_is_placed_again(router: Router) -> None:
    router.start("a")
    conversation = tokens(100)
    router.tell("a", blocks("stored", conversation))
    request = ask(conversation[:50])
    request.output_token_ids = conversation[50:]
    assert router.feed.cached_tokens(request) == {"a": 96}
    request.output_token_ids = [999 - token for token in conversation[50:]]
    assert router.feed.cached_tokens(request) == {"a": 48}


def test_with_kept_states_a_prefix_ends_at_a_state(router: Router) -> None:
    """Such workers report only the blocks after which they keep a state."""
    cache = msgspec.structs.replace(CACHE, has_states=True)
    router.start("a", "b", "c", cache=cache)
    whole = [*block_identities(cache.root(), tokens(320), 16)]
    router.tell("a", KvChange("stored", Medium.GPU, whole[3] + whole[11]))
    router.tell("b", KvChange("stored", Medium.GPU, whole[7]))
    assert router.found(tokens(320)) == {"a": 192, "b": 128}
    assert router.found(tokens(320)[:192]) == {"a": 64, "b": 128}, "the last token is computed"
    assert router.found(tokens(320)[:193]) == {"a": 192, "b": 128}
    assert router.found(tokens(320)[:100]) == {"a": 64}
    router.tell("a", KvChange("removed", Medium.GPU, whole[11]))
    assert router.found(tokens(320)) == {"a": 64, "b": 128}


def test_unlike_formats_do_not_mix(router: Router) -> None:
    small = CacheFormat(model="m", kv_format="f/8", block_size=8)
    router.start("a")
    router.start("b", cache=small)
    router.tell("a", blocks("stored", tokens(100)))
    identities = b"".join(block_identities(small.root(), tokens(100), 8))
    router.tell("b", KvChange("stored", Medium.GPU, identities))
    assert router.found(tokens(100)) == {"a": 96, "b": 96}
    assert router.found(tokens(15)) == {"b": 8}


def test_a_restarted_workers_blocks_are_forgotten(router: Router) -> None:
    router.start("a", incarnation="old")
    router.tell("a", blocks("stored", tokens(100)), incarnation="old")
    router.start("a", "b", incarnation="new")
    assert router.found(tokens(100)) == {}
    router.tell("a", blocks("stored", tokens(100)), incarnation="old", number=2)
    assert router.dropped("unknown_worker") == 1
    router.tell("a", blocks("stored", tokens(50)), number=1)
    router.tell("b", blocks("stored", tokens(100)))
    for _ in range(10_000):
        router.feed.sweep()
    assert router.found(tokens(100)) == {"a": 48, "b": 96}
    router.registry.mark_dead("b", "new", "it was killed")
    router.feed.sweep()
    assert router.found(tokens(100)) == {"a": 48}


def test_bad_events_are_counted_and_change_nothing(router: Router) -> None:
    router.start("a")
    router.tell("a", blocks("stored", tokens(100)))
    stored = blocks("stored", tokens(100))
    router.tell("nobody", stored)
    router.tell("a", KvChange("removed", Medium.GPU, stored.identities[:-1]))
    router.tell("a", blocks("removed", tokens(100)), number=1)
    assert [router.dropped(why) for why in ("unknown_worker", "malformed", "duplicate")] == [1, 1, 1]
    assert router.found(tokens(100)) == {"a": 96}
    assert router.sent == []


def test_missing_events_are_requested_at_intervals(router: Router) -> None:
    router.start("a")
    for number in (2, 3):
        router.tell("a", blocks("stored", tokens(100)), number=number)
    assert router.dropped("gap") == 2
    assert router.sent == [ReplayKvEvents(incarnation="new", first=1)]
    assert router.found(tokens(100)) == {}


def test_a_heartbeat_reveals_lost_events(router: Router) -> None:
    """It may overtake the events, so they count as lost only after a while."""
    router.start("a")
    state = WorkerState(worker_id="a", incarnation="new", role="decode", num_kv_events=2)
    for now in (0, 0, LATE_S):
        router.feed.check(state, now)
        assert router.sent == []
    router.feed.check(state, LATE_S + 0.1)
    assert router.sent == [ReplayKvEvents(incarnation="new", first=1)]


def test_announced_events_may_arrive_while_more_are_announced(router: Router) -> None:
    router.start("a")
    for number in range(1, 10):
        state = WorkerState(worker_id="a", incarnation="new", role="decode", num_kv_events=number + 2)
        router.feed.check(state, 0.7 * number * LATE_S)
        router.tell("a", blocks("stored", tokens(100)), number=number)
    assert router.sent == []


@pytest.mark.parametrize(
    ("incarnation", "sampling", "asked"),
    [("new", {}, "decode-1"), ("old", {}, None), ("new", {"prompt_logprobs": 1}, None)],
)
def test_only_the_incarnation_that_computed_a_prefix_is_asked_for_it(
    router: Router, incarnation: str, sampling: dict[str, Any], asked: str | None
) -> None:
    router.start("decode-0")
    router.start("decode-1", incarnation=incarnation)
    router.tell("decode-1", blocks("stored", tokens(500)), incarnation=incarnation)
    router.start("decode-1") if incarnation == "old" else None
    assert router.placer.place(ask(tokens(500), **sampling)) is None
    (message,) = router.sent
    assert message.incarnation == "new"
    assert (message.prefix.worker_id if message.prefix else None) == asked


SHARED, CHAIN = 20, 60
SHARES = {f"worker {number}": 1 - number / 60 for number in range(30)}
"""The share of a prompt's blocks that each worker has."""


def chain(seed: int, length: int = CHAIN) -> list[int]:
    """Return keys of a prompt's blocks. All prompts share the first ones."""
    shared = random.Random(0).randbytes(16 * SHARED)
    return block_keys(shared + random.Random(seed).randbytes(16 * (length - SHARED)))


@pytest.mark.parametrize("num_holders", [3, 40])
def test_random_holdings(num_holders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder has a leading part of some prompts, and loses the end first."""
    monkeypatch.setattr(kv_index, "MAX_SHARED_SETS", 50)
    rng = random.Random(num_holders)
    index: KvIndex[str] = KvIndex()
    prompts = [chain(seed) for seed in range(1, 6)]
    held: dict[str, dict[int, int]] = {}
    slots: dict[str, int] = {}
    most_slots = 0
    for step in range(3000):
        name = f"worker {rng.randrange(num_holders)}"
        if name not in slots:
            slots[name], held[name] = index.add_holder(name), defaultdict(int)
        prompt, length = rng.randrange(len(prompts)), rng.randrange(CHAIN)
        keys, now = prompts[prompt], held[name][prompt]
        match rng.randrange(20):
            case 0:
                index.remove_holder(slots.pop(name))
                del held[name]
            case 1 | 2 | 3 | 4 if length >= SHARED:
                index.evict(slots[name], keys[length:])
                held[name][prompt] = min(now, length)
            case 5:
                index.sweep(rng.choice([0.0005, 1.0]))
            case _:
                index.store(slots[name], keys[:length])
                for other in range(len(prompts)):
                    shared = length if other == prompt else min(length, SHARED)
                    held[name][other] = max(held[name][other], shared)
        most_slots = max(most_slots, max(slots.values(), default=0))
        if step % 10 == 0:
            expected = {name: lengths[prompt] for name, lengths in held.items() if lengths[prompt]}
            assert index.find(keys) == expected
    assert most_slots < num_holders + 50, "slots are used again"


def test_removed_holders_leave_nothing() -> None:
    index: KvIndex[str] = KvIndex()
    slots = [index.add_holder(f"worker {number}") for number in range(40)]
    for slot in slots:
        index.store(slot, chain(slot + 1))
    for slot in slots[1:]:
        index.remove_holder(slot)
    assert index.find(chain(5)) == {"worker 0": SHARED}
    while index.sweep(0.001):
        pass
    assert len(index) == CHAIN
    assert index.find(chain(1)) == {"worker 0": CHAIN}
    assert index.add_holder("new") in slots[1:]
    assert index.find(chain(5)) == {"worker 0": SHARED}


def test_a_gap_ends_a_prefix() -> None:
    index: KvIndex[str] = KvIndex()
    for name, length in {"a": CHAIN, "b": CHAIN, "c": CHAIN, "d": CHAIN // 3}.items():
        index.store(index.add_holder(name), chain(1)[:length])
    index.evict(1, chain(1)[CHAIN // 2 :][:1])
    index.evict(2, chain(1)[CHAIN // 4 :][:1])
    assert index.find(chain(1)) == {"a": CHAIN, "b": CHAIN // 2, "c": CHAIN // 4, "d": CHAIN // 3}


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_with_a_window_a_prefix_needs_only_its_last_blocks(block_size: int) -> None:
    rng, window = random.Random(block_size), Window(100, block_size)
    index: KvIndex[str] = KvIndex()
    keys = chain(1)
    held = {name: {place for place in range(CHAIN) if rng.random() < share} for name, share in SHARES.items()}
    for name, places in held.items():
        index.store(index.add_holder(name), [keys[place] for place in places])

    def longest(places: set[int], limit: int) -> int:
        ends = range(limit, 0, -1)
        return next(
            (end for end in ends if places >= set(range(window.first_place(end * block_size), end))), 0
        )

    for limit in (0, 1, 5, CHAIN // 2, CHAIN):
        expected = {name: end for name, places in held.items() if (end := longest(places, limit))}
        assert index.find_windows(keys[:limit], window) == expected
    assert len({longest(places, CHAIN) for places in held.values()}) > 3
