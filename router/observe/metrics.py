"""The Prometheus metrics of the router, of the workers (from heartbeats), and of the whole server."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol import metrics as declared
from protocol.config import ServeConfig
from protocol.outputs import RequestTiming
from protocol.worker_to_router import PairState, WorkerState
from router.requests.journal import Generation, LiveRequest
from router.workers.registry import Worker

_TRANSFER_STAGES = {
    "reserve_s": "request_kv_reserve_time_seconds",
    "transfer_s": "request_kv_transfer_time_seconds",
    "exposed_s": "request_kv_transfer_exposed_time_seconds",
    "wait_s": "request_kv_transfer_wait_time_seconds",
    "handoff_s": "request_kv_handoff_time_seconds",
    "transferred_bytes": "request_kv_transfer_bytes",
}
"""Histograms by field of `TransferTiming`."""

_VLLM = "|".join(name.removesuffix("_total") for name in declared.VLLM)
_SUFFIX = "(?:_total|_created|_bucket|_sum|_count)?[ {]"
_AS_VLLM = re.compile(f"^(# (?:HELP|TYPE) )?{declared.PREFIX}((?:{_VLLM}){_SUFFIX})".encode(), re.MULTILINE)

Limit = Literal["key_requests", "key_tokens", "key_concurrent"]
"""A limit of an API key."""
RefusalReason = Literal["queue_full", "shed", "no_worker", "slo_ttft", "slo_tpot"] | Limit
ConnectionEnd = Literal["late_head", "large_head", "malformed", "unread", "too_many"]
"""Reasons why the router closes a client's connection."""


class LoopHistogram(Collector):
    """A histogram without locks: the event loop observes, any thread reads. The last bound is infinity."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = [*bounds, inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        totals = zip(map(floatToGoString, self._bounds), accumulate([*self._counts]), strict=True)
        family.add_metric([self._model_name], list(totals), self._sum)
        yield family


class Metrics:
    """All metrics of the router, in their own registry."""

    def __init__(self, model_name: str, workers: Iterable[Worker], as_vllm: bool = False) -> None:
        """Initialize. Each scrape reads `workers`. `as_vllm`: metrics that vLLM has too get vLLM's names."""
        self._as_vllm = as_vllm
        self.registry = CollectorRegistry()
        self.registry.register(WorkerCollector(workers, model_name))
        self._model_name = model_name
        self._families: list[Any] = []
        self._metrics: dict[str, Any] = {metric.name: self._create(metric) for metric in declared.ROUTER}
        self.inter_token_latency: LoopHistogram = self._metrics["inter_token_latency_seconds"]
        self._cpu_s = self._core_wait_s = 0.0
        self._children: dict[tuple[str, tuple[object, ...]], Any] = {}

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. With many workers, call it in a thread."""
        text = generate_latest(self.registry)
        return _AS_VLLM.sub(rb"\1vllm:\2", text) if self._as_vllm else text

    def count(self, name: str, *labels: object, by: float = 1) -> None:
        """Increase a counter, or change a gauge; `labels` are the values of its own labels."""
        self._child(name, labels).inc(by)

    def set(self, name: str, *labels: object, to: float) -> None:
        """Set a gauge; `labels` are the values of its own labels."""
        self._child(name, labels).set(to)

    def follow(self, name: str, read: Callable[[], float]) -> None:
        """Let a gauge without labels of its own call `read` at each scrape."""
        self._metrics[name].set_function(read)

    def own_samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yield name, labels and value of the router's own samples; for histograms only sum and count."""
        for family in self._families:
            for sample in next(iter(family.collect())).samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    yield sample.name.removeprefix(declared.PREFIX), sample.labels, sample.value

    def observe_loop(self, late_s: float, cpu_s: float, core_wait_s: float) -> None:
        """Record the lateness of a timer, and the event loop's total CPU time and wait for a core."""
        self._observe("router_loop_lag_seconds", max(late_s, 0.0))
        self.count("router_cpu_seconds_total", by=max(cpu_s - self._cpu_s, 0.0))
        self.count("router_core_wait_seconds_total", by=max(core_wait_s - self._core_wait_s, 0.0))
        self._cpu_s, self._core_wait_s = cpu_s, core_wait_s

    def predicted(self, quantity: Literal["ttft", "tpot"], predicted_s: float, observed_s: float) -> None:
        """Record the predicted and the measured time of a placement."""
        error_s = abs(predicted_s - observed_s)
        for name, seconds in (("predicted", predicted_s), ("observed", observed_s), ("error", error_s)):
            if 0 <= seconds < inf:
                self.count(f"placement_{name}_seconds_total", quantity, by=seconds)

    def first_token(self, request: LiveRequest, now: float) -> None:
        self._observe("time_to_first_token_seconds", now - request.generation.arrival)
        self.count("prompt_tokens_total", by=len(request.choice.prompt.token_ids))

    def observe_timing(self, timing: RequestTiming) -> None:
        if timing.queue_s or timing.prefill_s:
            self._observe("request_queue_time_seconds", timing.queue_s)
            self._observe("request_prefill_time_seconds", timing.prefill_s)
        if timing.transfer is not None:
            for field, name in _TRANSFER_STAGES.items():
                self._observe(name, getattr(timing.transfer, field))

    def request_finished(self, request: LiveRequest, now: float) -> None:
        self.count("request_success_total", request.choice.finish_reason or "stop")
        self._observe("e2e_request_latency_seconds", now - request.generation.arrival)
        self._observe("request_prompt_tokens", len(request.choice.prompt.token_ids))
        self._observe("request_generation_tokens", request.choice.num_tokens)
        others, decode_s = request.choice.num_tokens - 1, now - request.first_token_time
        if others > 0:
            self._observe("request_decode_time_seconds", decode_s)
            self._observe("request_time_per_output_token_seconds", decode_s / others)

    def generation_finished(self, generation: Generation) -> None:
        longest = max(choice.num_tokens for choice in generation.choices)
        self._observe("request_max_num_generation_tokens", longest)

    def _observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value)

    def _child(self, name: str, labels: tuple[object, ...]) -> Any:
        """Return the metric with these values of its own labels."""
        known = self._children.get((name, labels))
        if known is None:
            family = self._metrics[name]
            known = family.labels(*labels, self._model_name) if labels else family
            self._children[name, labels] = known
        return known

    def _create(self, metric: declared.Metric) -> Any:
        """Create the metric. Return the family if it has labels of its own, else its only child."""
        name = declared.PREFIX + metric.name
        if metric.kind == "histogram":
            histogram = LoopHistogram(name, metric.help, metric.buckets, self._model_name)
            self.registry.register(histogram)
            self._families.append(histogram)
            return histogram
        kind: type = {"counter": Counter, "gauge": Gauge}[metric.kind]
        family = kind(name, metric.help, [*metric.labels, "model_name"], registry=self.registry)
        self._families.append(family)
        return family if metric.labels else family.labels(self._model_name)


_FIELDS = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prefix_cache_queries_total": "prefix_query_tokens",
    "prefix_cache_hits_total": "prefix_hit_tokens",
    "num_preemptions_total": "num_preemptions",
    "engine_steps_total": "steps",
}
"""Fields of `WorkerState` by metric."""
_REPORTED = {metric.name: metric for metric in declared.REPORTED}
_PAIR_COUNTERS = {metric.name: metric for metric in declared.PAIR_COUNTERS}
_IN_USE, _REFUSED, _OVERLAP = declared.PAIR_STATE


class _Families(dict[str, CounterMetricFamily | GaugeMetricFamily]):
    """Metric families by name, created on demand. `common`: labels of all metrics of a group."""

    def add_sample(
        self, metric: declared.Metric, common: Sequence[str], labels: Sequence[str], value: float
    ) -> None:
        family = self.get(metric.name)
        if family is None:
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            names = [*common, *metric.labels]
            family = self[metric.name] = kind(declared.PREFIX + metric.name, metric.help, labels=names)
        family.add_metric(labels, value)


class WorkerCollector:
    """A collector, at each scrape, of the metrics of live workers and of pairs of live workers."""

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
    for metric in declared.WORKER:
        families.add_sample(metric, common, labels, getattr(state, _FIELDS[metric.name]))
    for key, value in state.counters.items():
        if found := declared.reported(key, _REPORTED):
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
        if found := declared.reported(key, _PAIR_COUNTERS):
            families.add_sample(found[0], common, [*labels, *found[1]], value)


class ServerTotals(Collector):
    """The sums, at each scrape, of the workers' loads and the `num_parked` requests that wait here."""

    def __init__(
        self,
        config: ServeConfig,
        workers: Iterable[Worker],
        num_parked: Callable[[], int],
        adapters: Callable[[], Collection[str]],
    ) -> None:
        self._config, self._workers = config, workers
        self._num_parked, self._adapters = num_parked, adapters

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = [worker.state for worker in self._workers if worker.live and not worker.role.holds_draft]
        blocks = sum(state.total_blocks for state in states)
        held = sum(state.kv_usage * state.total_blocks for state in states)
        waiting = sum(state.num_waiting for state in states) + self._num_parked()
        yield self._gauge("num_requests_running", sum(state.num_running for state in states))
        yield self._gauge("num_requests_waiting", waiting)
        yield self._gauge("kv_cache_usage_perc", held / blocks if blocks else 0.0)
        shape = {"block_size": str(self._config.block_size), "num_gpu_blocks": str(blocks)}
        yield self._gauge("cache_config_info", 1, shape)
        adapters = self._adapters()
        loaded = {"max_lora": str(len(adapters)), "running_lora_adapters": ",".join(adapters)}
        yield self._gauge("lora_requests_info", time.time(), loaded | {"waiting_lora_adapters": ""})

    def _gauge(self, name: str, value: float, labels: dict[str, str] | None = None) -> GaugeMetricFamily:
        labels = {"model_name": self._config.model_name, **(labels or {})}
        text = "For the whole server, as vLLM has it."
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
