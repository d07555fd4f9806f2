"""Prometheus queries and the graphs that show their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.metrics import PREFIX


class Panel(NamedTuple):
    """A graph over time. `queries` maps legends to queries; `unit` is one of Grafana's units."""

    title: str
    unit: str
    queries: Mapping[str, str]


def rate(name: str, *by: str, where: str = "") -> str:
    """Return the query of a counter's rate per second, summed by labels."""
    return f"{_sum(by)} (rate({PREFIX}{name}{where}[$__rate_interval]))"


def value(name: str, *by: str, where: str = "") -> str:
    """Return the query of a gauge, summed by labels."""
    return f"{_sum(by)} ({PREFIX}{name}{where})"


def quantiles(histogram: str) -> dict[str, str]:
    buckets = rate(f"{histogram}_bucket", "le")
    return {f"p{100 * q:g}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


def share(part: str, *wholes: str) -> str:
    """Return the query of a part's share of the sum of `wholes`."""
    return f"{part} / ({' + '.join(wholes)})"


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"


def counters(names: Mapping[str, str], *by: str, where: str = "") -> dict[str, str]:
    """Return the rates of several counters, given the legend of each."""
    labels = "".join(f" {{{{{label}}}}}" for label in by)
    return {legend + labels: rate(name, *by, where=where) for legend, name in names.items()}
