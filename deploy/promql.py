"""Queries of Prometheus, and the graphs that show what they find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.metrics import PREFIX


class Panel(NamedTuple):
    """A graph over time. `queries` are by their legends; `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: Mapping[str, str]


def rate(name: str, *by: str, where: str = "") -> str:
    """Of a counter, a second, summed by labels."""
    return f"{_sum(by)} (rate({PREFIX}{name}{where}[$__rate_interval]))"


def value(name: str, *by: str, where: str = "") -> str:
    """Of a gauge, summed by labels."""
    return f"{_sum(by)} ({PREFIX}{name}{where})"


def quantiles(histogram: str) -> dict[str, str]:
    buckets = rate(f"{histogram}_bucket", "le")
    return {f"p{100 * q:g}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


def share(part: str, *wholes: str) -> str:
    """Of the whole, or of the wholes' sum."""
    return f"{part} / ({' + '.join(wholes)})"


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"


def counters(names: Mapping[str, str], *by: str, where: str = "") -> dict[str, str]:
    """The rates of several counters, by what they are called in the legend."""
    labels = "".join(f" {{{{{label}}}}}" for label in by)
    return {legend + labels: rate(name, *by, where=where) for legend, name in names.items()}
