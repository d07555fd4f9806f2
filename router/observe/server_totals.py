"""The load of the whole server under vLLM's names, for what reads one sample of a server.

Endpoint pickers of the Gateway API inference extension (its model server protocol, proposal 003) read the
queue, the use of KV, the size of its blocks and the adapters, and take a family's first sample. A sample for
each worker would tell them of one worker alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.config import ServeConfig
from router.workers.registry import Worker


class ServerTotals(Collector):
    """Sums the workers' loads at each scrape. `num_parked` requests wait in the router for a worker."""

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
        family = GaugeMetricFamily(
            f"vllm:{name}", "For the whole server, as vLLM has it.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), value)
        return family
