"""Prometheus metrics: vLLM's names with `tandem_` in front, plus the workers' own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.messages import RequestTiming
from router.counter_names import parse_counter_name
from router.journal import LiveRequest
from router.pair_metrics import PairCollector
from router.registry import Worker

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


_TRANSFER_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 10.0, 30.0),
)
_BYTES_BUCKETS = tuple(float(4**power) for power in range(6, 19))
_TRANSFER_STAGES = (
    ("reserve_s", "reserve_time_seconds", "From asking the decode worker for blocks to having them."),
    ("transfer_s", "transfer_time_seconds", "From the first push until all of the prompt was in place."),
    ("exposed_s", "transfer_exposed_time_seconds", "The part of it after the prompt was computed."),
    ("wait_s", "transfer_wait_time_seconds", "Pieces waited for their turn on the wire, summed."),
    ("handoff_s", "handoff_time_seconds", "From the last block's arrival to the first decode step."),
)
"""Fields of `TransferTiming`."""


class Metrics:
    """All of the router's metrics, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that started.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._family("request_success", "Sequences finished.", ["finished_reason"])
        self._failures = self._family("request_failures", "Requests that failed.", ["kind"])
        self._dropped = self._family("messages_dropped", "Worker messages not taken.", ["reason"])
        self._placements = self._family("placements", "Placement decisions.", ["kind"])
        self._placed_anew = self._family(
            "requests_placed_anew", "Requests given to other workers, with the tokens they had.", ["reason"]
        )
        self._redirects = self._family(
            "handoff_redirects", "Hand-offs turned elsewhere without a new prefill.", ["reason"]
        )
        self._takeovers = self._family(
            "handoff_takeovers", "Requests that their prefill worker decodes itself.", ["reason"]
        )
        self._role_fallbacks = self._family(
            "role_fallbacks", "Requests served by one worker because the other role has none.", ["missing"]
        )
        self._http = self._family("http_responses", "HTTP responses.", ["status"])
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between a sequence's outputs.", _TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean per sequence, without the first.", _TOKEN_BUCKETS
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Waiting at a worker before it is taken up.", _REQUEST_BUCKETS
        )
        self._prefill = self._histogram("request_prefill_time_seconds", "In prefill.", _REQUEST_BUCKETS)
        self._transfer = {
            field: self._histogram(f"request_kv_{name}", text, _TRANSFER_BUCKETS)
            for field, name, text in _TRANSFER_STAGES
        }
        self._transferred = self._histogram(
            "request_kv_transfer_bytes", "What the wire carried of a prompt.", _BYTES_BUCKETS
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def watch_workers(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self.registry.register(_WorkerCollector(workers, self._model["model_name"]))
        self.registry.register(PairCollector(workers, self._model["model_name"]))

    def failed(self, kind: str) -> None:
        self._failures.labels(kind=kind, **self._model).inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason=reason, **self._model).inc()

    def placed(self, disaggregated: bool) -> None:
        kind = "disaggregated" if disaggregated else "colocated"
        self._placements.labels(kind=kind, **self._model).inc()

    def placed_anew(self, reason: str) -> None:
        self._placed_anew.labels(reason=reason, **self._model).inc()

    def redirected(self, reason: str) -> None:
        self._redirects.labels(reason=reason, **self._model).inc()

    def taken_over(self, reason: str) -> None:
        self._takeovers.labels(reason=reason, **self._model).inc()

    def role_fallback(self, missing: str) -> None:
        self._role_fallbacks.labels(missing=missing, **self._model).inc()

    def http_response(self, status: int) -> None:
        self._http.labels(status=str(status), **self._model).inc()

    def first_token(self, request: LiveRequest, now: float) -> None:
        self._first_token.observe(now - request.generation.arrival)
        self.prompt_tokens.inc(len(request.choice.prompt.token_ids))

    def observe_timing(self, timing: RequestTiming) -> None:
        if timing.queue_s or timing.prefill_s:
            self._queue.observe(timing.queue_s)
            self._prefill.observe(timing.prefill_s)
        if timing.transfer is not None:
            for field, histogram in self._transfer.items():
                histogram.observe(getattr(timing.transfer, field))
            self._transferred.observe(timing.transfer.transferred_bytes)

    def request_finished(self, request: LiveRequest, now: float) -> None:
        reason = request.choice.finish_reason or "stop"
        self._success.labels(finished_reason=reason, **self._model).inc()
        self._end_to_end.observe(now - request.generation.arrival)
        others = request.choice.num_tokens - 1
        if others > 0:
            self._per_token.observe((now - request.first_token_time) / others)

    def _family(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"tandem_{name}", text, [*labels, "model_name"], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(name, text, []).labels(**self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"tandem_{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(**self._model)


class _WorkerCollector:
    """What the workers' heartbeats say, read when somebody asks."""

    _GAUGES = {  # noqa: RUF012
        "num_requests_running": ("Requests in a worker's running batch.", lambda s: s.num_running),
        "num_requests_waiting": ("Requests queued at a worker.", lambda s: s.num_waiting),
        "kv_cache_usage_perc": (
            "Share of the KV pool that requests hold, 0 to 1.",
            lambda s: 1 - (s.free_blocks + s.cached_blocks) / s.total_blocks if s.total_blocks else 0.0,
        ),
    }
    _COUNTERS = {  # noqa: RUF012
        "prefix_cache_queries": (
            "Prompt tokens looked up in the prefix cache.",
            lambda s: s.prefix_query_tokens,
        ),
        "prefix_cache_hits": ("Prompt tokens found there.", lambda s: s.prefix_hit_tokens),
        "num_preemptions": ("Requests preempted.", lambda s: s.num_preemptions),
        "engine_steps": ("Steps run.", lambda s: s.steps),
    }

    def __init__(self, workers: Callable[[], Iterable[Worker]], model_name: str) -> None:
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        workers = [worker for worker in self._workers() if worker.live]
        labels = ["worker", "role", "model_name"]
        for name, (text, read) in self._GAUGES.items():
            gauge = GaugeMetricFamily(f"tandem_{name}", text, labels=labels)
            for worker in workers:
                gauge.add_metric(self._labels(worker), read(worker.state))
            yield gauge
        for name, (text, read) in self._COUNTERS.items():
            counter = CounterMetricFamily(f"tandem_{name}", text, labels=labels)
            for worker in workers:
                counter.add_metric(self._labels(worker), read(worker.state))
            yield counter
        yield from self._worker_counters(workers)

    def _labels(self, worker: Worker) -> list[str]:
        return [worker.key.worker_id, worker.role, self._model_name]

    def _worker_counters(self, workers: list[Worker]) -> Iterator[Metric]:
        """Each worker's own counters, named `name_total` or `name_total{label=value,...}`."""
        families: dict[tuple[str, ...], CounterMetricFamily | GaugeMetricFamily] = {}
        for worker in workers:
            for key, value in worker.state.counters.items():
                name, labels = parse_counter_name(key)
                if name is None:
                    continue
                family_key = (name, *labels)
                if family_key not in families:
                    family_type = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[family_key] = family_type(
                        f"tandem_{name.removesuffix('_total')}",
                        "Reported by the workers.",
                        labels=["worker", "role", "model_name", *labels],
                    )
                families[family_key].add_metric([*self._labels(worker), *labels.values()], value)
        yield from families.values()
