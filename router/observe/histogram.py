"""A histogram for one thread. Prometheus' own takes three locks for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """A histogram that the event loop observes and any thread reads. `bounds` rise; the last has no bound."""

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
