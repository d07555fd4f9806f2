"""The names under which workers report their counters."""

from __future__ import annotations

import re

_NAME = re.compile(r"([a-z][a-z0-9_]{0,99})(?:\{([^{}]*)\})?\Z")
_LABEL = re.compile(r'([a-z][a-z0-9_]*)="?([^",]*)"?\Z')


def parse_counter_name(key: str) -> tuple[str | None, dict[str, str]]:
    """`name{label="value"}` to its parts; the name is None where it is not one that Prometheus takes."""
    match = _NAME.match(key)
    if match is None:
        return None, {}
    labels = {}
    for part in filter(None, (match.group(2) or "").split(",")):
        label = _LABEL.match(part.strip())
        if label is None or label.group(1) in ("worker", "role", "model_name"):
            return None, {}
        labels[label.group(1)] = label.group(2)
    return match.group(1), labels
