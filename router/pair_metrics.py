"""What the workers' heartbeats say of KV transfer between each two of them, for Prometheus.

A pair is there as long as both its workers are: what one that left had to say of it leaves with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.messages import PairState
from router.counter_names import parse_counter_name
from router.registry import Worker

_LABELS = ("worker", "role", "model_name", "peer", "transport")

_ERRORS = "kv_transfer_errors_total"
_TEXTS = {
    "kv_transfer_bytes_total": "Bytes that the wire carried to the peer.",
    "kv_transfer_pieces_total": "Pieces that the peer acknowledged.",
    "kv_transfer_extents_total": "Runs of adjacent blocks in them.",
    "kv_transfer_wire_seconds_total": "Time in which some piece was on its way; bytes over it: bandwidth.",
    "kv_transfer_wait_seconds_total": "Time that pieces waited for their turn, summed.",
    "kv_transfers_total": "Prompts handed over, from the first push to the last acknowledgement.",
    "kv_transfers_failed_total": "Prompts whose way to the peer was given up.",
    "kv_transfer_seconds_total": "Time that they took, summed.",
    "kv_transfer_busy_seconds_total": "The part of it in which some of the prompt was on its way.",
    "kv_transfer_hidden_seconds_total": "The part of that in which the prompt was still being computed.",
    "kv_transfer_resent_pieces_total": "Pieces that were sent again.",
    "kv_transfer_fallbacks_total": "Changes to this transport because a better one failed.",
    "kv_transfer_recoveries_total": "Changes back to this transport from a worse one.",
    "kv_transfer_leases_expired_total": "Hand-offs given up because nothing moved.",
    _ERRORS: "What went wrong on the wire, by kind; most of it is repaired.",
    "kv_receive_bytes_total": "Bytes taken from the peer.",
    "kv_receive_pieces_total": "Pieces taken from the peer.",
    "kv_receive_seconds_total": "Time from each piece's announcement to its place in the pool, summed.",
}


class PairCollector:
    """Reads the pairs of the live workers when somebody asks."""

    def __init__(self, workers: Callable[[], Iterable[Worker]], model_name: str) -> None:
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        pairs = list(self._pairs())
        in_use = GaugeMetricFamily(
            "tandem_kv_transport",
            "1 for the transport over which a worker sends to its peer.",
            labels=_LABELS,
        )
        refused = GaugeMetricFamily(
            "tandem_kv_transport_refused",
            "1 for a transport that does not serve the pair, or without a peer, nobody.",
            labels=[*_LABELS, "reason"],
        )
        overlap = GaugeMetricFamily(
            "tandem_kv_transfer_overlap_ratio",
            "Share of the transfers' busy time in which their prompts were still being computed.",
            labels=_LABELS,
        )
        for labels, pair in pairs:
            if pair.in_use:
                in_use.add_metric(labels, 1)
            if pair.refused:
                refused.add_metric([*labels, pair.refused], 1)
            busy_s = pair.counters.get("kv_transfer_busy_seconds_total", 0.0)
            if busy_s > 0:
                hidden_s = pair.counters.get("kv_transfer_hidden_seconds_total", 0.0)
                overlap.add_metric(labels, hidden_s / busy_s)
        yield from (in_use, refused, overlap)
        yield from _counters(pairs)

    def _pairs(self) -> Iterator[tuple[list[str], PairState]]:
        workers = [worker for worker in self._workers() if worker.live]
        known = {worker.key.worker_id for worker in workers} | {""}
        for worker in workers:
            for pair in worker.state.pairs:
                if pair.peer in known:
                    labels = [worker.key.worker_id, worker.role, self._model_name, pair.peer, pair.transport]
                    yield labels, pair


def _counters(pairs: list[tuple[list[str], PairState]]) -> Iterator[Metric]:
    """Only the counters that are known here: a worker can't add names."""
    families: dict[str, CounterMetricFamily] = {}
    for labels, pair in pairs:
        for key, value in pair.counters.items():
            name, more = parse_counter_name(key)
            if name not in _TEXTS or list(more) != (["kind"] if name == _ERRORS else []):
                continue
            if name not in families:
                names = [*_LABELS, *more]
                families[name] = CounterMetricFamily(
                    f"tandem_{name.removesuffix('_total')}", _TEXTS[name], labels=names
                )
            families[name].add_metric([*labels, *more.values()], value)
    yield from families.values()
