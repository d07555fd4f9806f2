"""Dashboards and alerts use existing metrics and labels; each alert has a test case."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from protocol.metrics import PAIR_COUNTERS, PAIR_STATE, PREFIX, REPORTED, ROUTER, WORKER
from tests.deploy.record_series import recorded

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "grafana" / "dashboards"
PROMETHEUS = DEPLOY / "prometheus"
PROMETHEUS_LABELS = {"instance", "job"}
OF_PROMETHEUS = {"up": PROMETHEUS_LABELS}
_WORKER = 'worker="decode-0", role="decode"'
_PAIR = f'{_WORKER}, peer="decode-1", transport="tcp"'
SELDOM = (
    'tandem_request_failures_total{kind="timeout"}',
    'tandem_handoff_takeovers_total{reason="no_worker"}',
    'tandem_kv_events_dropped_total{reason="gap"}',
    'tandem_role_fallbacks_total{missing="prefill"}',
    f"tandem_kv_leases_lost_total{{{_WORKER}}}",
    f'tandem_kv_transfer_errors_total{{{_PAIR}, kind="lost"}}',
    f"tandem_kv_transfer_fallbacks_total{{{_PAIR}}}",
    f"tandem_kv_transfer_recoveries_total{{{_PAIR}}}",
    f"tandem_kv_transfer_resent_pieces_total{{{_PAIR}}}",
    f'tandem_spec_acceptance_collapsed_total{{{_WORKER}, method="ngram", origin="computed"}}',
    f"tandem_spec_decode_lost_drafts_total{{{_WORKER}}}",
    f"tandem_spec_decode_refused_drafts_total{{{_WORKER}}}",
    f'tandem_spec_decode_unavailable_total{{{_WORKER}, method="ngram"}}',
)
"""Series that a healthy server does not have."""
SELECTOR = re.compile(rf"{PREFIX}\w+(?:{{[^}}]*}})?")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def exposed() -> dict[str, set[str]]:
    """Return by name the labels of each series that `/metrics` has."""
    groups = {
        (): ROUTER,
        ("worker", "role"): (*WORKER, *REPORTED),
        ("worker", "role", "peer", "transport"): (*PAIR_STATE, *PAIR_COUNTERS),
    }
    found = dict(OF_PROMETHEUS)
    for common, metrics in groups.items():
        for metric in metrics:
            labels = {"model_name", *common, *metric.labels} | PROMETHEUS_LABELS
            name = PREFIX + metric.name
            if metric.kind == "histogram":
                found |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
            else:
                found[name] = labels
    return found


EXPOSED = exposed()


def wrong_in(query: str) -> list[str]:
    """Return the unknown names of a query."""
    wrong = []
    common: set[str] | None = None
    for name, selector in re.findall(rf"\b({PREFIX}\w+|up)\b(?:\{{(.*?)\}})?", query):
        if name not in EXPOSED:
            wrong.append(name)
            continue
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector)))
        wrong += [f"{name}: {label}" for label in asked - EXPOSED[name]]
        common = EXPOSED[name] if common is None else common & EXPOSED[name]
    grouped = {label for labels in re.findall(r"\bby \((.*?)\)", query) for label in labels.split(", ")}
    wrong += [f"by {label}" for label in grouped - (common or set())]
    return wrong


def queries() -> Iterator[tuple[str, str, str]]:
    """Return panel, legend and query of each dashboard's file."""
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["legendFormat"], target["expr"]


def rules() -> list[Mapping[str, str]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def test_panels_use_existing_metrics() -> None:
    asked = list(queries())
    assert len(asked) > 100
    assert {where: wrong for where, _, query in asked if (wrong := wrong_in(query))} == {}
    for where, legend, query in asked:
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert re.search(rf"\bby \([^)]*\b{label}\b", query), f"{where}: {legend} has no {label}"


def test_alerts_use_existing_metrics() -> None:
    assert {rule["alert"]: wrong for rule in rules() if (wrong := wrong_in(rule["expr"]))} == {}


def test_each_alert_has_a_case_in_which_only_it_fires() -> None:
    cases = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    expected = {case["name"]: case["promql_expr_test"][0]["exp_samples"] for case in cases}
    assert expected.pop("all is well") == []
    names = [rule["alert"] for rule in rules()]
    assert expected == {name: [{"labels": f'{{alertname="{name}"}}', "value": 1}] for name in names}


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))


@needs_promtool
def test_prometheus_reads_its_configuration_and_each_query(tmp_path: Path) -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    asked = {query.replace("$__rate_interval", "1m") for _, _, query in queries()}
    records = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(sorted(asked))]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    promtool("check", "rules", str(path))


@needs_promtool
def test_each_query_finds_something(tmp_path: Path) -> None:
    """Joins and label values of each query match series of a real server's recording."""
    panels = {query.replace("$__rate_interval", "1m").replace("$worker", ".+") for _, _, query in queries()}
    selectors = {found for rule in rules() for found in SELECTOR.findall(rule["expr"])}
    told = [*recorded(), *SELDOM, 'up{job="tandem"}']
    counted = re.compile(r"_(total|sum|count|bucket)$")
    steps = {name: "0+1x20" if counted.search(name.partition("{")[0]) else "1x20" for name in told}
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in steps.items()],
        "promql_expr_test": [
            {
                "expr": f"count({query}) > bool 0",
                "eval_time": "5m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for query in sorted(panels | selectors)
        ],
    }
    path = tmp_path / "recorded.yml"
    path.write_text(json.dumps({"rule_files": [], "evaluation_interval": "15s", "tests": [case]}))
    promtool("test", "rules", str(path))


def test_the_recorded_series_are_current() -> None:
    """If it fails: python -m tests.deploy.record_series"""
    told = PROMETHEUS_LABELS | {"model_name"}
    for series in (*recorded(), *SELDOM):
        name, labels = series.partition("{")[0], set(re.findall(r'(\w+)="', series))
        assert labels == EXPOSED.get(name, set()) - told, series


def test_alerts_see_the_first_event_too() -> None:
    """`increase` misses a counter that first appears with 1: it must exist with 0 before."""
    there = {name.partition("{")[0] for name in recorded()}
    for rule in rules():
        for name in re.findall(rf"increase\(({PREFIX}\w+)", rule["expr"]):
            assert name in there or re.search(rf"unless {name}\S* offset", rule["expr"]), rule["alert"]


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafanas_files_fit_together() -> None:
    provisioning = FOLDER.parent / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/tandem.yml").read_text())["providers"]
    prometheus = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    for path in FOLDER.iterdir():
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        for panel in panels:
            assert {
                panel["datasource"]["uid"],
                *(each["datasource"]["uid"] for each in panel["targets"]),
            } == {source["uid"]}
