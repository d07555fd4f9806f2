"""The Prometheus metrics of the workers' heartbeats, read at each scrape.

A worker has samples as long as it lives, a pair as long as both its workers live.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from protocol.metrics import PAIR_COUNTERS, PAIR_STATE, PREFIX, REPORTED, WORKER, Metric, reported
from protocol.worker_to_router import PairState, WorkerState
from router.workers.registry import Worker

_FIELDS = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prefix_cache_queries_total": "prefix_query_tokens",
    "prefix_cache_hits_total": "prefix_hit_tokens",
    "num_preemptions_total": "num_preemptions",
    "engine_steps_total": "steps",
}
"""The fields of `WorkerState`, by the metric that shows each."""
_REPORTED = {metric.name: metric for metric in REPORTED}
_PAIR_COUNTERS = {metric.name: metric for metric in PAIR_COUNTERS}
_IN_USE, _REFUSED, _OVERLAP = PAIR_STATE


class _Families(dict[str, CounterMetricFamily | GaugeMetricFamily]):
    """The samples of each metric. `common` names the labels of all metrics of a group."""

    def add_sample(self, metric: Metric, common: Sequence[str], labels: Sequence[str], value: float) -> None:
        family = self.get(metric.name)
        if family is None:
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            names = [*common, *metric.labels]
            family = self[metric.name] = kind(PREFIX + metric.name, metric.help, labels=names)
        family.add_metric(labels, value)


class WorkerCollector:
    """Collects the metrics of all live workers."""

    def __init__(self, workers: Iterable[Worker], model_name: str) -> None:
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        workers = [worker for worker in self._workers if worker.live]
        known = {worker.key.worker_id for worker in workers} | {""}
        families = _Families()
        for worker in workers:
            labels = [worker.key.worker_id, worker.role.name, self._model_name]
            _add_worker(families, worker.state, labels)
            for pair in worker.state.pairs:
                if pair.peer in known:
                    _add_pair(families, pair, [*labels, pair.peer, pair.transport])
        yield from families.values()


def _add_worker(families: _Families, state: WorkerState, labels: list[str]) -> None:
    common = ("worker", "role", "model_name")
    for metric in WORKER:
        families.add_sample(metric, common, labels, getattr(state, _FIELDS[metric.name]))
    for key, value in state.counters.items():
        if found := reported(key, _REPORTED):
            families.add_sample(found[0], common, [*labels, *found[1]], value)


def _add_pair(families: _Families, pair: PairState, labels: list[str]) -> None:
    common = ("worker", "role", "model_name", "peer", "transport")
    if pair.in_use:
        families.add_sample(_IN_USE, common, labels, 1)
    if pair.refused:
        families.add_sample(_REFUSED, common, [*labels, pair.refused], 1)
    busy_s = pair.counters.get("kv_transfer_busy_seconds_total", 0.0)
    if busy_s > 0:
        hidden_s = pair.counters.get("kv_transfer_hidden_seconds_total", 0.0)
        families.add_sample(_OVERLAP, common, labels, hidden_s / busy_s)
    for key, value in pair.counters.items():
        if found := reported(key, _PAIR_COUNTERS):
            families.add_sample(found[0], common, [*labels, *found[1]], value)
