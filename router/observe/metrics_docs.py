"""Generates `docs/metrics.md` from the declarations: `python -m router.observe.metrics_docs`."""

from __future__ import annotations

from pathlib import Path

from protocol.metrics import PAIR_COUNTERS, PAIR_STATE, PREFIX, REPORTED, ROUTER, WORKER

TARGET = Path(__file__).parents[2] / "docs" / "metrics.md"
_HEAD = """\
# Metrics

All metrics of `/metrics`. This file is generated from [protocol/metrics.py](../protocol/metrics.py) by
`python -m router.observe.metrics_docs` (checked by
`tests/router/observe/test_metrics_declared.py::test_the_document_is_up_to_date`). Times are in seconds, sizes
in bytes. Counters start at 0 with their process.
"""
_GROUPS = {
    "The router": ("All have the label `model_name`.", ROUTER),
    "Workers": (
        "All have the labels `worker`, `role` and `model_name`. A lost worker has no samples.",
        (*WORKER, *REPORTED),
    ),
    "Pairs of workers": (
        "KV transfer from `worker` to `peer`. All have the labels `worker`, `role`, `model_name`, `peer` and "
        "`transport`. A pair has no samples once one of its workers is lost.",
        (*PAIR_STATE, *PAIR_COUNTERS),
    ),
}


def render() -> str:
    """Return the document's text."""
    lines = [_HEAD]
    for title, (about, metrics) in _GROUPS.items():
        lines += [
            f"## {title}\n",
            f"{about}\n",
            "| metric | type | labels | meaning |",
            "|---|---|---|---|",
        ]
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render())
