"""`/metrics` and `/workers` report KV transfers between each two workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.worker_to_router import PairState

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
