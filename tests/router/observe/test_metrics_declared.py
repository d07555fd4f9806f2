"""Metrics: all are declared, documented and shown as Prometheus expects, and pairs of workers have labels."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.kv.tiers.disk import DiskCounters
from engine.kv.tiers.host import HostCounters
from kvtransfer.pairs import Pairs
from protocol.config import ServeConfig
from protocol.metrics import PAIR_COUNTERS, PAIR_STATE, REPORTED, ROUTER, VLLM, WORKER, reported
from protocol.roles import ROLES
from protocol.worker_to_router import PairState, WorkerState
from router.observe.metrics import LoopHistogram, ServerTotals
from speculation.account import Account
from tests.docs.metrics_table import DOCUMENT, document
from worker.parts import Counters

BY_NAME = {metric.name: metric for metric in REPORTED}


def test_the_document_is_up_to_date():
    text = DOCUMENT.read_text()
    assert document(text) == text, "run: python -m tests.docs.metrics_table"


def test_the_router_counts_only_what_is_declared():
    labels = {metric.name: len(metric.labels) for metric in ROUTER if metric.kind != "histogram"}
    sources = [path.read_text() for path in (DOCUMENT.parents[1] / "router").rglob("*.py")]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    counted = [(name, len(call.args) - 1) for call in calls if (name := _counted(call)) is not None]
    assert len(counted) > 40
    for name, number in counted:
        assert labels.get(name) == number, name


def _counted(call: ast.Call) -> str | None:
    """Return the metric's name if this is a call of a `count` method with one."""
    match call:
        case ast.Call(ast.Attribute(attr="count"), [ast.Constant(str(name)), *_]) if name.isidentifier():
            return name
    return None


def test_names_are_unique_and_show_their_kind():
    groups = ([*ROUTER, *WORKER, *REPORTED], [*PAIR_STATE, *PAIR_COUNTERS])
    for metrics in groups:
        assert len({metric.name for metric in metrics}) == len(metrics)
        for metric in metrics:
            assert metric.name.endswith("_total") == (metric.kind == "counter")
            assert bool(metric.buckets) == (metric.kind == "histogram")


def test_vllms_names_are_given_on_request(make_router):
    texts = {}
    reports = {
        f'{name}{{method="ngram"' + (', position="0"}' if "per_pos" in name else "}"): 1.0
        for name in VLLM
        if name.startswith("spec_decode")
    }
    for names in ("tandem", "vllm"):
        router = make_router(metric_names=names)
        router.add_worker(counters=reports)
        assert router.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
        texts[names] = router.http.get("/metrics").text
    assert "vllm:" not in texts["tandem"]
    for name in VLLM:
        assert re.search(rf"^vllm:{name}(_bucket|_count)?{{", texts["vllm"], re.MULTILINE), name
        assert not re.search(rf"tandem_{name}", texts["vllm"]), name
    renamed = re.sub(r"^# .*For the whole server.*\n# .*\n", "", texts["vllm"], flags=re.MULTILINE)
    renamed = renamed.replace("vllm:", "tandem_")
    assert re.findall(r"^# .*", renamed, re.MULTILINE) == re.findall(r"^# .*", texts["tandem"], re.MULTILINE)


def test_the_panels_of_vllms_dashboard_find_their_metrics(make_router):
    """The queries of grafana.json among vLLM's examples, by today's name of the time between tokens."""
    panels = """
        e2e_request_latency_seconds_bucket prompt_tokens_total generation_tokens_total
        inter_token_latency_seconds_bucket num_requests_running num_requests_waiting
        time_to_first_token_seconds_bucket kv_cache_usage_perc request_prompt_tokens_bucket
        request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
        request_prefill_time_seconds_sum request_decode_time_seconds_sum
        request_max_num_generation_tokens_sum
    """
    router = make_router(metric_names="vllm")
    router.add_worker()
    body = {"prompt": "x", "max_tokens": 3, "n": 2}
    assert router.http.post("/v1/completions", json=body).status_code == 200
    text = router.http.get("/metrics").text
    for name in panels.split():
        assert re.search(rf'^vllm:{name}{{.*model_name="', text, re.MULTILINE), name
    found = re.findall(r"^vllm:(request_\w+_tokens)_sum{.*} (\S+)$", text, re.MULTILINE)
    sums = {name: float(value) for name, value in found}
    assert sums["request_generation_tokens"] == 6 and sums["request_prompt_tokens"] >= 2
    assert sums["request_max_num_generation_tokens"] == 3


def test_an_endpoint_picker_reads_the_whole_servers_load(make_router):
    """It takes the first sample of each family, as the inference extension's model server protocol has it."""

    def worker(role: str, live: bool = True, **load: Any) -> Any:
        state = WorkerState(worker_id=role, incarnation="a", role=role, total_blocks=100, **load)
        return SimpleNamespace(live=live, role=ROLES[role], state=state)

    workers = [
        worker("decode", free_blocks=50, num_running=2, num_waiting=1),
        worker("prefill", free_blocks=80, cached_blocks=20, num_running=2, num_waiting=3),
        worker("decode", live=False, num_waiting=100),
        worker("draft", num_running=100),
    ]
    totals = ServerTotals(ServeConfig(block_size=16), workers, lambda: 5, lambda: ["a", "b"])
    samples = {family.name.removeprefix("vllm:"): family.samples for family in totals.collect()}
    assert all(len(each) == 1 for each in samples.values())
    first = {name: each[0] for name, each in samples.items()}
    loads = [first[f"num_requests_{name}"].value for name in ("running", "waiting")]
    assert [*loads, first["kv_cache_usage_perc"].value] == [4, 9, 0.25]
    assert first["cache_config_info"].labels.items() >= {("block_size", "16"), ("num_gpu_blocks", "200")}
    adapters = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": ""}
    assert first["lora_requests_info"].labels.items() >= adapters.items()
    assert first["lora_requests_info"].value > 0
    shown = make_router(metric_names="vllm").http.get("/metrics").text
    assert all(f"\nvllm:{name}{{" in shown for name in samples)


def test_all_counters_of_workers_are_declared():
    account = Account()
    account.chose("ngram", 3)
    account.stepped(0.1, True)
    account.drafted("ngram", 0.1)
    account.verified("ngram", 3, 2)
    for number in range(1000):
        account.observed_first("ngram", "computed", number < 500)
    account.lost_draft("request", "a test")
    account.could_not_draft("ngram")
    names = list(account.counters())
    names += [f"kv_host_{field.name}_total" for field in fields(HostCounters)]
    names += [f"kv_disk_{field.name}_total" for field in fields(DiskCounters)]
    assert [name for name in names if reported(name, BY_NAME) is None] == []


def test_a_worker_counts_only_declared_metrics():
    with pytest.raises(KeyError):
        Counters().add("made_up_total")
    with pytest.raises(AssertionError):
        Pairs().add("decode-0", "tcp", {"made_up_total": 1})


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ('spec_decode_choices_total{method="ngram", k="4"}', ["ngram", "4"]),
        ("spec_decode_choices_total{k=4,method=ngram}", ["ngram", "4"]),
        ("spec_decode_choices_total{k=4}", None),
        ("spec_decode_choices_total{k=4,method=a,kind=b}", None),
        ("spec_decode_choices_total{k=4,k=5}", None),
        ("spec_decode_choices_total", None),
        ("handoffs_total", []),
        ("handoffs_total{}", []),
        ("handoffs_total{worker=other}", None),
        ("made_up_total", None),
    ],
)
def test_reported_names(key, found):
    declared = reported(key, BY_NAME)
    assert (declared[1] if declared else None) == found


BOUNDS = (0.001, 0.5, 10.0, 1e6)


@given(st.lists(st.floats(min_value=-1, max_value=1e9) | st.sampled_from(BOUNDS)))
@example([])
def test_values_are_shown_as_prometheus_shows_them(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("tandem_a_seconds", "What it is.", BOUNDS, "a model")
    ours.register(histogram)
    own = Histogram("tandem_a_seconds", "What it is.", ["model_name"], buckets=BOUNDS, registry=theirs)
    for value in values:
        histogram.observe(value)
        own.labels("a model").observe(value)
    if not values:
        own.labels("a model")
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected


PAIRS = [
    PairState(
        peer="decode-0",
        transport="tcp",
        in_use=True,
        counters={
            "kv_transfer_bytes_total": 4096.0,
            "kv_transfer_wire_seconds_total": 0.5,
            "kv_transfer_busy_seconds_total": 2.0,
            "kv_transfer_hidden_seconds_total": 1.5,
            "kv_transfer_errors_total{kind=lost}": 3.0,
            "kv_transfer_errors_total": 4.0,
            "kv_transfer_bytes_total{kind=odd}": 5.0,
            "made_up_total": 1.0,
        },
    ),
    PairState(peer="decode-0", transport="shm", refused="other_host", reason="another host"),
    PairState(peer="decode-0", transport="", counters={"kv_transfer_leases_expired_total": 2.0}),
    PairState(peer="", transport="ucx", refused="unavailable", reason="no such device"),
    PairState(peer="decode-9", transport="tcp", counters={"kv_transfer_bytes_total": 1.0}),
]


def samples(router: Any) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples about pairs: their specific labels, and their values."""
    text = httpx.get(f"{router.url}/metrics", timeout=60).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "peer" in sample.labels:
                labels = {k: v for k, v in sample.labels.items() if k not in ("role", "model_name")}
                found.setdefault(sample.name, []).append((labels, sample.value))
    return found


@pytest.fixture
def router(make_router: Callable[..., Any]) -> Any:
    router = make_router()
    router.add_worker("decode-0")
    router.add_worker("prefill-0", "prefill", pairs=PAIRS)
    return router


def test_each_pair_has_its_labels(router: Any) -> None:
    found = samples(router)
    tcp = {"worker": "prefill-0", "peer": "decode-0", "transport": "tcp"}
    shm = {**tcp, "transport": "shm"}
    assert found == {
        "tandem_kv_transport": [(tcp, 1.0)],
        "tandem_kv_transport_refused": [
            ({**shm, "reason": "other_host"}, 1.0),
            ({"worker": "prefill-0", "peer": "", "transport": "ucx", "reason": "unavailable"}, 1.0),
        ],
        "tandem_kv_transfer_overlap_ratio": [(tcp, 0.75)],
        "tandem_kv_transfer_bytes_total": [(tcp, 4096.0)],
        "tandem_kv_transfer_wire_seconds_total": [(tcp, 0.5)],
        "tandem_kv_transfer_busy_seconds_total": [(tcp, 2.0)],
        "tandem_kv_transfer_hidden_seconds_total": [(tcp, 1.5)],
        "tandem_kv_transfer_errors_total": [({**tcp, "kind": "lost"}, 3.0)],
        "tandem_kv_transfer_leases_expired_total": [({**tcp, "transport": ""}, 2.0)],
    }


def test_a_departed_peer_leaves_no_labels(router: Any) -> None:
    assert samples(router)["tandem_kv_transport"]
    worker = router.server.state.registry.named("decode-0")
    router.server.mark_dead("decode-0", worker.key.incarnation, "the test says so")
    for _ in range(200):
        if "decode-0" not in {worker["id"] for worker in router.http.get("/workers").json()["workers"]}:
            break
    assert samples(router) == {
        "tandem_kv_transport_refused": [
            ({"worker": "prefill-0", "peer": "", "transport": "ucx", "reason": "unavailable"}, 1.0)
        ]
    }
