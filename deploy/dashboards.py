"""Writes Grafana's dashboards to `deploy/grafana/dashboards/`: `python -m deploy.dashboards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.panels import DASHBOARDS
from deploy.promql import Panel
from protocol.metrics import PREFIX

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
DATA_SOURCE = {"type": "prometheus", "uid": "prometheus"}
"""The data source that `deploy/grafana/provisioning/datasources/` defines."""

_COLUMNS, _HEIGHT = 3, 8
_GRID_WIDTH = 24

_WORKER_CHOICE = {
    "name": "worker",
    "type": "query",
    "datasource": DATA_SOURCE,
    "query": f"label_values({PREFIX}engine_steps_total, worker)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "current": {"text": "All", "value": "$__all"},
}


def render(name: str) -> str:
    """Return a dashboard in Grafana's JSON format."""
    panels = [_panel(number, panel) for number, panel in enumerate(DASHBOARDS[name])]
    dashboard = {
        "uid": f"tandem-{name}",
        "title": f"Tandem: {name}",
        "tags": ["tandem"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_WORKER_CHOICE] if name == "worker" else []},
        "links": [{"type": "dashboards", "title": "Tandem", "tags": ["tandem"], "asDropdown": True}],
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    width = _GRID_WIDTH // _COLUMNS
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": column * width, "y": row * _HEIGHT, "w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATA_SOURCE, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(render(each))
