"""The placements that each policy chooses and must not choose."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs.drafting import TRIAL_SHARE
from protocol.costs import StepCosts
from protocol.errors import ConfigError
from protocol.roles import Task
from router.placement import RULES, placement_policy
from router.placement.by_cost import cost, place_by_cost
from router.placement.cluster import Cluster
from router.placement.interface import (
    LinkSpeed,
    Placement,
    PolicyState,
    Prediction,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)
from router.placement.predict import (
    MAX_RETRY_S,
    decode_cost,
    fetch_seconds,
    handoff_seconds,
    prefill_cost,
    refusal,
    slowed_s,
)
from tests.router.placed import COSTS, answer, decode, facts, placed, predicted, prefill

SPLITTING = sorted(set(RULES) - {"cost"})


def test_least_loaded_takes_the_least_loaded_of_each_role():
    workers = [
        prefill("p0", prefill_tokens=500),
        prefill("p1", prefill_tokens=20, requests=9),
        decode("d0", requests=3),
        decode("d1", requests=2),
    ]
    assert placed("least_loaded", workers).workers == {"prefill": "p1", "decode": "d1"}
    usage = [decode("d0", kv_usage=0.9), decode("d1", kv_usage=0.5)]
    assert placed("least_loaded", usage).workers["decode"] == "d1", "KV usage breaks ties"


def test_round_robin_takes_one_after_the_other():
    workers = [decode(f"d{index}", requests=index) for index in range(3)]
    names = [placed("round_robin", workers, turn=turn).workers["decode"] for turn in range(4)]
    assert names == ["d0", "d1", "d2", "d0"]
    assert placed("round_robin", workers, facts(avoid=frozenset({"d0"}))).workers["decode"] == "d1"


def test_power_of_two_takes_the_less_loaded_of_two():
    workers = [decode(f"d{index}", requests=index) for index in range(4)]
    names = [placed("power_of_two", workers, turn=turn).workers["decode"] for turn in range(400)]
    shares = [names.count(f"d{index}") / 400 for index in range(4)]
    # The least loaded worker is in three of the six pairs, and the most loaded wins none.
    assert shares == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0], abs=0.08) and shares[3] == 0


def test_cache_aware_prefers_the_cache_unless_it_is_overloaded_or_small():
    workers = [decode("d0"), decode("d1", requests=1), decode("d2")]
    cached = facts(cached_tokens={"d1": 200})
    assert placed("cache_aware", workers, cached).workers["decode"] == "d1"
    assert placed("cache_aware", workers, facts(cached_tokens={"d1": 100})).workers["decode"] != "d1"
    workers[1] = decode("d1", requests=9)
    assert placed("cache_aware", workers, cached).workers["decode"] != "d1"
    cold = [decode("d0", requests=5), decode("d1", requests=1)]
    assert placed("cache_aware", cold).workers["decode"] == "d1", "nothing is cached: the least loaded"


@pytest.mark.parametrize("policy", RULES)
def test_fallbacks(policy):
    assert placed(policy, [decode("d0")]) == Placement({"decode": "d0"}, missing="prefill")
    assert placed(policy, [prefill("p0")]) == Placement({"decode": "p0"}, missing="decode")
    both = [prefill("p0"), decode("d0")]
    assert placed(policy, both, facts(disaggregate=False)) == Placement({"decode": "d0"})
    only_prefill = WorkerSnapshot(worker_id="p0", tasks=("prefill",))
    assert isinstance(answer(policy, [only_prefill]), Refusal), "it may not be asked to decode"
    assert isinstance(answer(policy, []), Refusal)


def test_the_source_of_the_prefix_is_the_first_worker_unless_another_is_named():
    workers: dict[Task, str] = {"prefill": "p0", "decode": "d0"}
    assert Placement(workers).source == "p0"
    assert Placement(workers, prefix="p1").source == "p1"


@pytest.mark.parametrize("policy", RULES)
def test_a_worker_that_failed_a_request_gets_it_again_only_as_the_last_one(policy):
    workers = [prefill("p0"), prefill("p1", prefill_tokens=5000, prompts=3), decode("d0")]
    workers.append(decode("d1", requests=9, rows=9))
    avoided = placed(policy, workers, facts(avoid=frozenset({"p0", "d0"})))
    assert set(avoided.workers.values()) <= {"p1", "d1"}
    assert placed(policy, [decode("d0")], facts(avoid=frozenset({"d0"}))).workers == {"decode": "d0"}


@pytest.mark.parametrize("policy", SPLITTING)
def test_the_holder_of_the_prompt_prefills_it_again(policy):
    workers = [prefill("p0"), prefill("p1", prefill_tokens=500), decode("d0")]
    assert placed(policy, workers, facts(prefix_at="p1")).workers["prefill"] == "p1"
    assert placed(policy, workers, facts(prefix_at="p2")).workers["prefill"] in ("p0", "p1")


def test_prefill_and_decode_policies_are_chosen_separately():
    policy = placement_policy("cost", "round_robin", "least_loaded")
    workers = [prefill("p0"), prefill("p1"), decode("d0", requests=4), decode("d1", requests=2)]
    found, state = policy.place(facts(), Cluster(workers), PolicyState(1))
    assert isinstance(found, Placement)
    assert (dict(found.workers), state) == ({"prefill": "p1", "decode": "d1"}, PolicyState(2))
    for flags in (("magic",), ("cost", "magic"), ("cost", "cost", "magic")):
        with pytest.raises(ConfigError, match="placement: unknown policy 'magic'; known: round_robin, "):
            placement_policy(*flags)


def test_a_custom_policy_is_named_by_its_module():
    assert placement_policy("router.placement.rules:least_loaded") == placement_policy("least_loaded")
    for name, problem in (
        ("no_such_module:rule", "there is no no_such_module:rule: No module named"),
        ("router.placement.rules:rule", "there is no router.placement.rules:rule: module"),
        ("router.placement.rules:OVERLOAD", "router.placement.rules:OVERLOAD is no function"),
    ):
        with pytest.raises(ConfigError, match=f"--decode-placement: {problem}"):
            placement_policy("cost", "cost", name)


@pytest.mark.parametrize("policy", RULES)
def test_a_session_stays_at_its_worker_until_that_is_overloaded(policy):
    workers = [decode(f"d{index}") for index in range(4)]
    homes = {
        session: placed(policy, workers, facts(session=session)).workers["decode"]
        for session in map(str, range(40))
    }
    assert set(homes.values()) == {"d0", "d1", "d2", "d3"}
    left = [worker for worker in workers if worker.worker_id != "d2"]
    for session, home in homes.items():
        moved = placed(policy, left, facts(session=session)).workers["decode"]
        assert moved == home or home == "d2", "only the sessions of who left move"
    session = next(session for session, home in homes.items() if home == "d1")
    workers[1].requests = workers[1].rows = 30
    assert placed(policy, workers, facts(session=session)).workers["decode"] != "d1"


# --- cost -----------------------------------------------------------------------------------------


def is_split(workers, **changes) -> bool:
    return "prefill" in placed("cost", workers, facts(**changes)).workers


def test_cost_splits_a_prompt_that_would_hold_up_many_and_not_an_idle_worker():
    idle = [prefill("p0"), decode("d0")]
    assert not is_split(idle), "a hand-off would bring nothing"
    busy = [prefill("p0"), decode("d0", rows=16, requests=16, context_tokens=5000)]
    busy[0].tasks = ("prefill",)
    assert is_split(busy, num_tokens=1500)
    busy[0].prefill_tokens, busy[0].prompts = 200_000, 100
    assert not is_split(busy, num_tokens=16), "the prefill worker's queue is longer than what the others lose"


@pytest.mark.parametrize(
    ("workers", "disaggregate", "options", "missing"),
    [
        ("pd", True, ["d", "p", "pd"], None),
        ("pd", False, ["d"], None),
        ("d", True, ["d"], "prefill"),
        ("d", False, ["d"], None),
        ("p", True, ["p"], "decode"),
        ("p", False, ["p"], "decode"),
    ],
)
def test_cost_compares_all_options(
    workers: str, disaggregate: bool, options: list[str], missing: str | None
) -> None:
    """A prefill worker may decode too if requests may be split, or if nobody else can."""
    there = [{"p": prefill, "d": decode}[name](name) for name in workers]
    found = placed("cost", there, facts(disaggregate=disaggregate))
    compared = ["".join(option.workers.values()) for option in found.options]
    assert (sorted(compared), found.missing) == (options, missing)


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("workers", [[prefill("p0"), decode("d0")], [prefill("p0")], [decode("d0")]])
@pytest.mark.parametrize("split", [True, False])
def test_a_client_chooses_whether_its_request_is_split(
    policy: str, workers: list[WorkerSnapshot], split: bool
) -> None:
    """If possible. The options are compared and shown all the same."""
    found = placed(policy, workers, facts(split=split))
    assert ("prefill" in found.workers) == (split and len(workers) == 2)
    if policy == "cost":
        assert found.options == placed(policy, workers).options


@pytest.mark.parametrize("held", [{"cached_tokens": {"d2": 1990}}, {"prefix_at": "d2"}])
def test_the_holder_of_the_prompt_is_compared_with_the_least_loaded(held: dict[str, Any]) -> None:
    links = {name: LinkSpeed(1.0, 1e6) for name in ("d0", "d1")}
    workers = [decode("d0"), decode("d1"), decode("d2", requests=1, rows=1, links=links)]
    assert placed("cost", workers, facts(num_tokens=2000, **held)).workers == {"decode": "d2"}


def test_a_prefix_is_fetched_if_that_is_faster_than_computing_it():
    workers = [decode("d0"), decode("d1", rows=60, requests=60, context_tokens=20_000)]
    workers[1].links = {"d0": LinkSpeed(1e-4, 1e9)}

    def source(policy: str, cached: dict[str, int]) -> str | None:
        found = placed(policy, workers, facts(num_tokens=2000, cached_tokens=cached))
        assert found.workers == {"decode": "d0"}
        return found.prefix

    for policy in ("cost", "least_loaded"):
        assert source(policy, {"d1": 1600}) == "d1"
        assert source(policy, {"d1": 100}) is None, "both workers' steps take longer than computing it"
        assert source(policy, {"d1": 1600, "d0": 1590}) is None
        assert source(policy, {"gone": 1990}) is None
        workers[1].links = {"d0": LinkSpeed(1e-4, 1e6)}
        assert source(policy, {"d1": 1600}) is None, "13 MB at a MB a second"
        workers[1].links = {"d0": LinkSpeed(1e-4, 1e9)}


def test_decoding_is_slowed_by_prompts_that_arrive_meanwhile():
    """As many prompts arrive as requests end. A request half as long as the mean meets half of them."""
    load = {"rows": 4, "context_tokens": 1024}
    without = predicted(placed("cost", [decode("d", **load)])).decode_s
    for mean, share in ((128, 127 / 128), (254, 0.5)):
        request = facts(mean_output_tokens=mean)
        worker = decode("d", computed_prompts=4, computed_tokens=1024, **load)
        found = predicted(placed("cost", [worker], request)).decode_s
        assert found - without == pytest.approx(4 * COSTS.chunks_s(256, 0, 512) * share, rel=1e-3)


def asked(workers: list[WorkerSnapshot], count: int, request: RequestFacts | None = None) -> Counter[str]:
    """Return the workers that decode this many requests, which come one after the other."""
    cluster, found = Cluster(workers), Counter()
    for _ in range(count):
        answer = place_by_cost(request or facts(), cluster)
        assert isinstance(answer, Placement)
        worker = cluster.get(answer.workers["decode"])
        assert worker is not None
        worker.last_placed = cluster.last_placed + 1
        cluster.put(worker)
        found[worker.worker_id] += 1
    return found


def test_a_worker_with_bad_measurements_is_tried_again_at_little_cost():
    """Nothing else would ever correct a measurement that keeps requests away."""
    slow = msgspec.structs.replace(COSTS, step_s=3 * COSTS.step_s, token_s=3 * COSTS.token_s)
    workers = [decode("good"), decode("slow", costs=slow)]
    ratio = predicted(placed("cost", workers[1:])).total_s / predicted(placed("cost", workers[:1])).total_s
    count = asked(workers, 2000)["slow"]
    assert count > 0
    assert count * (ratio - 1) <= 2000 * TRIAL_SHARE
    workers[1].costs = COSTS
    assert asked(workers, 100)["slow"] == 50


def test_busy_workers_and_those_too_slow_for_the_slo_get_no_trial():
    slow = msgspec.structs.replace(COSTS, step_s=3 * COSTS.step_s)
    assert asked([decode("good"), decode("slow", costs=slow, requests=1, rows=1)], 2000)["slow"] == 0
    assert asked([decode("good"), decode("slow", costs=slow)], 2000, facts(slo_tpot_s=4e-3))["slow"] == 0


# --- each term of the cost, by hand ---------------------------------------------------------------


def prediction(workers: list[WorkerSnapshot], names: tuple[str, ...] = ("d",), **changes: Any) -> Prediction:
    """Return the prediction for the option with these workers, even if another is chosen."""
    found = placed("cost", workers, facts(**changes))
    return next(
        option.predicted
        for option in found.options
        if tuple(option.workers.values()) == names and option.predicted is not None
    )


STEP_S = COSTS.step_s
"""The step time of a worker that decodes nothing."""


def test_queued_prompts_are_waited_for_one_by_one() -> None:
    """Three prompts of 600 tokens in all. Each attends to half of its 200 tokens on average."""
    waiting = decode("d", prefill_tokens=600, prompts=3, requests=3)
    assert prediction([waiting]).queue_s == pytest.approx(3 * (STEP_S + 200 * (1e-4 + 1e-8 * 100)))
    assert prediction([decode("d", requests=3)]).queue_s == 0
    pair = [prefill("p", prefill_tokens=600, prompts=3, requests=3), decode("d")]
    assert prediction(pair, ("p", "d")).queue_s == prediction([waiting]).queue_s


def test_only_uncached_tokens_are_computed_and_they_attend_to_cached_ones() -> None:
    found = prediction([decode("d")], cached_tokens={"d": 100})
    assert found.prefill_s == pytest.approx(STEP_S + 156 * (1e-4 + 1e-8 * (100 + 78)))
    assert prediction([decode("d")], cached_tokens={"d": 999}).prefill_s == pytest.approx(
        STEP_S + 1e-4, rel=0.1
    )


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    """1,024 tokens take two steps, which also decode the rows. Only the tokens delay the rows."""
    there = decode("d", rows=4, requests=4, context_tokens=1000)
    tokens_s = 1024 * (1e-4 + 1e-8 * 512)
    step_s = STEP_S + 4 * 1e-4 + 1000 * 1e-7
    found = prediction([there], num_tokens=1024)
    assert found.prefill_s == pytest.approx(2 * step_s + tokens_s)
    assert found.delay_s == pytest.approx(4 * tokens_s)
    chunk_s = decode("d", costs=msgspec.structs.replace(COSTS, chunk_s=5e-3))
    assert prediction([chunk_s], num_tokens=1024).prefill_s == pytest.approx(2 * (STEP_S + 5e-3) + tokens_s)


def test_beside_rows_chunks_keep_within_the_itl_budget() -> None:
    """The rest of 8 ms has room for 59 tokens after a mean of 512 others."""
    costs = msgspec.structs.replace(COSTS, itl_budget_s=8e-3)
    rows = {"rows": 1, "requests": 1}
    step_s, tokens_s = STEP_S + 1e-4, 1024 * (1e-4 + 1e-8 * 512)
    found = prediction([decode("d", costs=costs, **rows)], num_tokens=1024)
    chunk = costs.fitting_tokens(8e-3 - step_s, 512)
    assert 50 < chunk < 60
    assert found.prefill_s == pytest.approx(math.ceil(1024 / chunk) * step_s + tokens_s)
    tiny = msgspec.structs.replace(costs, itl_budget_s=1e-6, token_s=1e-3)
    found = prediction([decode("d", costs=tiny, **rows)], num_tokens=1024)
    assert found.prefill_s == pytest.approx(64 * step_s + 1024 * (1e-3 + 1e-8 * 512)), "a block at least"
    alone = prediction([decode("d", costs=costs)], num_tokens=1024)
    assert alone.prefill_s == pytest.approx(2 * STEP_S + tokens_s), "nobody decodes"


def test_a_fetch_takes_both_workers_steps_and_the_wire() -> None:
    """The other worker has 1,024 tokens more."""
    holder = decode("h", rows=4, requests=4, context_tokens=1000, links={"d": LinkSpeed(3e-3, 1e9)})
    found = prediction([decode("d"), holder], num_tokens=2000, cached_tokens={"h": 1536, "d": 512})
    steps_s = STEP_S + (STEP_S + 4e-4 + 1e-4)
    assert found.fetch_s == pytest.approx(steps_s + 3e-3 + 1024 * 8192 / 1e9)
    assert found.prefill_s == pytest.approx(STEP_S + 464 * (1e-4 + 1e-8 * (1536 + 232)))


SLOWER = msgspec.structs.replace(COSTS, token_s=1.2 * COSTS.token_s)


@pytest.mark.parametrize(
    ("worse", "better", "cached"),
    [
        pytest.param({"costs": SLOWER}, {}, {}, id="prefill"),
        pytest.param({"prefill_tokens": 2000, "prompts": 4}, {}, {}, id="queue"),
        pytest.param({"rows": 8}, {"costs": SLOWER}, {}, id="delay"),
        pytest.param({}, {}, {"holder": 1900}, id="fetch"),
    ],
)
def test_a_worker_that_is_worse_in_one_respect_does_not_prefill(
    worse: dict[str, Any], better: dict[str, Any], cached: dict[str, int]
) -> None:
    """Among equals its turn would come first."""
    links = {"worse": LinkSpeed(5e-3, 1e9), "better": LinkSpeed(0.0, 1e9)}
    holder = decode("holder", links=links)
    cluster = Cluster([prefill("worse", **worse), prefill("better", last_placed=1, **better), holder])
    chosen = cost(facts(num_tokens=2000, cached_tokens=cached), cluster, "prefill", PolicyState())
    assert chosen is not None and chosen.worker_id == "better"


def test_a_hand_off_costs_the_unhidden_transfer() -> None:
    """12 MB: a fast wire has only the last chunk left to move, a slow one most of all."""

    def handoff_s(bytes_per_s: float, latency_s: float = 0.0, **changes: Any) -> float:
        first = prefill("p", links={"d": LinkSpeed(latency_s, bytes_per_s)})
        return prediction(
            [first, decode("d", rows=4, requests=4)], ("p", "d"), num_tokens=1500, **changes
        ).handoff_s

    prefill_s = 3 * STEP_S + 1500 * (1e-4 + 1e-8 * 750)
    assert handoff_s(1e9) == pytest.approx(512 * 8192 / 1e9)
    assert handoff_s(1e9, 0.1) == pytest.approx(0.1 + 512 * 8192 / 1e9)
    assert handoff_s(2e7) == pytest.approx(1500 * 8192 / 2e7 - prefill_s)
    assert handoff_s(1e9, cached_tokens={"d": 1400}) == pytest.approx(100 * 8192 / 1e9)
    assert handoff_s(0.0) == 0.0, "never used: it is taken for free"


def test_decoding_pays_for_its_batch_and_for_slowing_it() -> None:
    """127 steps with one more row, whose context is 256 tokens and half of those to come."""
    found = prediction([decode("d", rows=4, requests=4, context_tokens=1000)])
    step_s = STEP_S + 5e-4 + (1000 + 256 + 127 / 2) * 1e-7
    assert found.decode_s == pytest.approx(127 * step_s)
    assert found.slowdown_s == pytest.approx(4 * 127 * (1e-4 + (256 + 127 / 2) * 1e-7))
    drafting = decode("d", costs=msgspec.structs.replace(COSTS, tokens_per_row=2.0))
    assert prediction([drafting]).decode_s == pytest.approx(
        127 / 2 * (STEP_S + 1e-4 + (256 + 127 / 2) * 1e-7)
    )


def test_a_decode_only_worker_shares_its_steps_with_waiting_prompts() -> None:
    pair = [prefill("p"), decode("d", prefill_tokens=400, prompts=2, requests=2)]
    waiting_s = 2 * 200 * (1e-4 + 1e-8 * 100)
    without = prediction([prefill("p"), decode("d")], ("p", "d")).decode_s
    assert prediction(pair, ("p", "d")).decode_s == pytest.approx(without + waiting_s)
    assert prediction(pair).decode_s == pytest.approx(without), "whole, they are in its queue"


def test_with_windows_the_kv_of_long_prompts_is_bounded() -> None:
    windowed = msgspec.structs.replace(COSTS, kv_windows=(1000,))
    load = {"rows": 4, "requests": 4, "context_tokens": 9000, "kv_tokens": 10_000, "kv_usage": 0.5}
    assert prediction([decode("d", **load)], num_tokens=3000).room_s > 0
    assert prediction([decode("d", costs=windowed, **load)], num_tokens=3000).room_s == 0
    links = {"d": LinkSpeed(bytes_per_s=1e6)}
    holder, asking = prefill("p", costs=windowed, links=links), decode("d", costs=windowed)
    moved_s = fetch_seconds(asking, holder, 3000) - fetch_seconds(asking, holder, 0)
    assert moved_s == pytest.approx(1000 * COSTS.kv_bytes / 1e6)
    computed = prefill_cost(facts(num_tokens=3000), holder, None)
    to = decode_cost(facts(num_tokens=3000), asking)
    slow = computed._replace(prefill_s=0.0)
    waited_s = handoff_seconds(slow, to, 3000) - handoff_seconds(slow, to, 0)
    assert waited_s == pytest.approx(1000 * COSTS.kv_bytes / 1e6)
    mixed = msgspec.structs.replace(COSTS, kv_windows=(0, 1000))
    assert mixed.kept_tokens(3000) == 2000 and mixed.kept_tokens(9000, 4) == 6500
    assert mixed.room_tokens(100, 16) == COSTS.room_tokens(100, 16) / 2 == 800


def test_waiting_for_kv_room_takes_as_long_as_requests_must_end_first() -> None:
    """183 tokens too many of 4,000 that run: the wait is this share of an answer's time."""
    load = {"rows": 4, "requests": 4, "context_tokens": 4000, "kv_tokens": 10_000}
    found = prediction([decode("d", kv_usage=0.98, **load)])
    assert found.room_s == pytest.approx(183 / 4000 * found.decode_s)
    assert prediction([decode("d", kv_usage=0.9, **load)]).room_s == 0
    packed = prediction([decode("d", kv_usage=0.98, **load)], num_tokens=9000)
    assert packed.room_s == pytest.approx(packed.decode_s), "all of it must end"
    full = {"rows": 4, "requests": 4, "context_tokens": 9900, "kv_tokens": 10_000}
    assert prediction([decode("d", **full)]).room_s > 0, "what is on its way counts, too"
    assert prediction([decode("d", kv_usage=1.0, **(full | {"kv_tokens": 0}))]).room_s == 0, (
        "nothing is known"
    )


def test_waiting_for_a_row_takes_as_long_as_requests_must_end_first() -> None:
    """A whole request waits to begin. A split one waits after its first token."""
    load = {"rows": 9, "requests": 9, "context_tokens": 4000}
    free, full = decode("d", max_rows=10, **load), decode("d", max_rows=4, **load)
    for names in (("d",), ("p", "d")):
        without, found = (prediction([prefill("p"), each], names) for each in (free, full))
        row_s = 6 / 4 * prediction([full]).decode_s
        assert found.total_s == pytest.approx(without.total_s + row_s), "6 of 4 at once must end"
        assert (found.ttft_s == without.ttft_s) == (len(names) == 2)
    unknown = prediction([decode("d", **load)])
    assert unknown == prediction([free])


# --- workers of one host --------------------------------------------------------------------------

LENDING = msgspec.structs.replace(COSTS, decode_scaling=0.5, prefill_scaling=0.9)
"""On twice the cores prompts take half as long, and decoding steps 0.7 times as long."""


def decoding(rows: int, **load: Any) -> dict[str, Any]:
    return {"rows": rows, "requests": rows, "context_tokens": 256 * rows} | load


def on_one_host(*workers: WorkerSnapshot) -> list[WorkerSnapshot]:
    for worker in workers:
        worker.on_host, worker.costs = workers, LENDING
    return list(workers)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_requests_keep_the_cores_that_the_prefill_worker_lends(rows: int) -> None:
    assert placed("cost", on_one_host(prefill("p"), decode("d", **decoding(rows)))).workers == {"decode": "d"}


def test_on_a_host_of_its_own_the_prefill_worker_takes_the_prompt() -> None:
    two_hosts = [prefill("p", costs=LENDING), decode("d", **decoding(3, costs=LENDING))]
    assert next(iter(placed("cost", two_hosts).workers.values())) == "p"


def test_many_requests_justify_taking_back_lent_cores() -> None:
    workers = on_one_host(prefill("p"), decode("d", **decoding(15)))
    assert placed("cost", workers).workers == {"prefill": "p", "decode": "d"}


def test_costs_are_those_of_the_cores_available_now() -> None:
    idle, busy = decode("d"), decode("d")
    on_one_host(prefill("p"), idle)
    on_one_host(prefill("p", requests=1), busy)
    assert (idle.costs_now, busy.costs_now) == (LENDING.on(2.0), LENDING)
    assert decode("d", costs=LENDING).costs_now is LENDING
    on_one_host(prefill("p", requests=1), prefill("q"), busy)
    assert busy.costs_now == LENDING.on(1.5)
    busy.costs = COSTS
    assert busy.costs_now == COSTS


def test_a_prompt_at_the_neighbour_uses_its_cores_only_while_it_lasts() -> None:
    """Otherwise one split prompt would halve the decode worker's predicted speed for whole answers."""
    p, d = on_one_host(prefill("p"), decode("d", **decoding(8)))
    idle_s = decode_cost(facts(), d).decode_s
    p.requests = p.prompts = p.computed_prompts = 1
    p.prefill_tokens = p.computed_tokens = 256
    assert idle_s < decode_cost(facts(), d).decode_s < 1.1 * idle_s
    assert slowed_s(p, 2.0) == pytest.approx(8 * (1 - 0.5**0.5) * 2.0), (
        "decoding there costs as much as before"
    )
    p.prompts = p.computed_prompts = 50
    p.prefill_tokens = p.computed_tokens = 50 * 256
    assert decode_cost(facts(), d).decode_s == pytest.approx(idle_s * 2**0.5), "prompts all the time"


@pytest.mark.parametrize("cached", ["p", "d"])
def test_a_wave_of_chats_decodes_on_one_worker_with_all_cores(cached: str) -> None:
    """The costs are SmolLM2-135M's. One prompt at `p`, for its cached prefix, must not draw others there."""
    p, d = on_one_host(prefill("p"), decode("d"))
    p.costs = d.costs = StepCosts(
        step_s=0.0143,
        row_s=0.00076,
        context_s=1.25e-6,
        chunk_s=0.0018,
        token_s=0.00033,
        kv_bytes=23040,
        decode_scaling=0.5,
        prefill_scaling=0.9,
    )
    for number in range(16):
        request = facts(num_tokens=60, output_tokens=96, cached_tokens={cached: 32})
        chosen = placed("cost", [p, d], request).workers
        by_name = {"p": p, "d": d}
        first, last = by_name[next(iter(chosen.values()))], by_name[chosen["decode"]]
        for worker in {first.worker_id: first, last.worker_id: last}.values():
            worker.requests, worker.last_placed = worker.requests + 1, number + 1
        first.prompts, first.prefill_tokens = first.prompts + 1, first.prefill_tokens + 60
        first.computed_prompts, first.computed_tokens = first.computed_prompts + 1, first.computed_tokens + 60
        last.rows, last.context_tokens = last.rows + 1, last.context_tokens + 60
    assert sorted((p.rows, d.rows)) == [0, 16]


def test_taking_cores_back_is_charged_with_the_others_loss() -> None:
    p, d = on_one_host(prefill("p"), decode("d", **decoding(3)))
    assert slowed_s(p, 2.0) == pytest.approx(3 * (1 - 0.5**0.5) * 2.0)
    p, d, _ = on_one_host(p, d, prefill("q"))
    assert slowed_s(p, 2.0) == pytest.approx(3 * (1 - (1.5 / 3) ** 0.5) * 2.0), "half of three shares is left"
    p.requests = p.prompts = 1
    assert slowed_s(d, 2.0) == 0.0, "it has its cores already"
    p.requests, d.costs = 0, COSTS
    assert slowed_s(p, 2.0) == 0.0, "it borrows none"
    _, idle = on_one_host(prefill("p", requests=2, prompts=2), decode("d"))
    assert slowed_s(idle, 2.0) == pytest.approx(2 * (1 - 0.5**0.9) * 2.0)


def test_a_neighbour_with_steps_of_no_time_loses_none() -> None:
    p, d = on_one_host(prefill("p"), decode("d", prompts=1, **decoding(3)))
    d.costs = StepCosts(step_s=0.0, row_s=0.0, context_s=0.0, token_s=0.0)
    assert slowed_s(p, 2.0) == 0.0


# --- all of them ----------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, -1, math.nan, math.inf, -math.inf, 1e300, 0.5]), st.integers(-5, 10**6)
)
NAMES = st.sampled_from(["a", "b", "c", "d", "gone", ""])


@st.composite
def snapshots(draw):
    costs = {name: draw(NUMBERS) for name in StepCosts.__struct_fields__}
    loads = ("requests", "rows", "context_tokens", "prefill_tokens", "prompts", "kv_usage", "kv_tokens")
    return WorkerSnapshot(
        worker_id=draw(NAMES.filter(lambda name: name != "gone")),
        tasks=draw(st.sampled_from([("prefill", "decode"), ("decode",)])),
        costs=StepCosts(**costs | {"kv_windows": (draw(NUMBERS), draw(NUMBERS))}),
        links={draw(NAMES): LinkSpeed(draw(NUMBERS), draw(NUMBERS))},
        **{name: draw(NUMBERS) for name in (*loads, "computed_prompts", "computed_tokens")},
    )


@settings(max_examples=120, deadline=None)
@given(
    st.lists(snapshots(), max_size=6),
    st.builds(
        RequestFacts,
        num_tokens=st.integers(-1, 10**6),
        output_tokens=NUMBERS,
        disaggregate=st.booleans(),
        prefix_at=st.one_of(st.none(), NAMES),
        cached_tokens=st.dictionaries(NAMES, st.integers(-5, 10**6)),
        session=st.text(max_size=3),
        avoid=st.frozensets(NAMES),
        slo_ttft_s=st.sampled_from([math.inf, 0.1]),
        slo_tpot_s=st.sampled_from([math.inf, 0.01]),
    ),
    st.sampled_from(sorted(RULES)),
    st.sampled_from(sorted(RULES)),
)
def test_no_snapshot_breaks_a_policy(workers, request, prefill_rule, decode_rule):
    cluster = Cluster()
    for worker in workers:
        cluster.put(worker)
        worker.on_host = workers[::2]
        worker.requests = 3
        cluster.put(worker)
    names = {worker.worker_id for worker in cluster}
    policy = placement_policy("cost", prefill_rule, decode_rule)
    for turn in range(2):
        found, _ = policy.place(request, cluster, PolicyState(turn))
        if isinstance(found, Placement):
            assert {*found.workers.values(), *filter(None, [found.prefix])} <= names
            assert "decode" in found.workers
            late = refusal(request, cluster, found)
            assert late is None or 0 <= late.retry_after_s <= MAX_RETRY_S
        else:
            assert not names or (not request.disaggregate and not cluster.count("decode"))
    for name in names:
        cluster.remove(name)
    assert isinstance(policy.place(request, cluster, PolicyState())[0], Refusal)


# --- choice among equals ----------------------------------------------------------------------------


def test_a_decode_worker_with_the_prompt_is_not_taken_as_prefill_worker():
    workers = [prefill("p0", prefill_tokens=4000, prompts=4, requests=4), decode("d0", rows=20, requests=20)]
    found = placed("cost", workers, facts(prefix_at="d0"))
    assert all(option.workers.get("prefill", "p0") == "p0" for option in found.options)


def test_queued_prompts_make_a_worker_dearer_to_decode_on():
    waits = decode("waits", requests=1, prompts=1, prefill_tokens=2000)
    runs = decode("runs", requests=2, rows=2)
    assert cost(facts(output_tokens=11), Cluster([waits, runs]), "decode", PolicyState()) is runs
    waits.prefill_tokens = waits.prompts = 0
    assert cost(facts(output_tokens=11), Cluster([waits, runs]), "decode", PolicyState()) is waits
