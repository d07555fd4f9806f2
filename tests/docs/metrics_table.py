"""Writes the tables of docs/metrics.md: `python -m tests.docs.metrics_table`."""

from __future__ import annotations

from pathlib import Path

from protocol.metrics import PAIR_COUNTERS, PAIR_STATE, PREFIX, REPORTED, ROUTER, WORKER, Metric
from tests.docs.models_table import with_rows

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
GROUPS = {
    "The router": ROUTER,
    "Workers": (*WORKER, *REPORTED),
    "Pairs of workers": (*PAIR_STATE, *PAIR_COUNTERS),
}
"""The metrics of each heading's table."""


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def document(text: str) -> str:
    """Return the page's text with the tables as the metrics are now."""
    for heading, metrics in GROUPS.items():
        text = with_rows(text, heading, map(row, metrics))
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
