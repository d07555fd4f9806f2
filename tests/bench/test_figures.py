"""The figures of LLM_SERVING.md can be drawn from the committed results, and are the committed ones."""

import re

import pytest
from matplotlib.figure import Figure

import bench.figures
from bench.figures import COLOURS, FIGURES, INK, figures
from bench.report import REPO


def test_every_figure_is_drawn_and_shown(tmp_path):
    figures(tmp_path)
    text = (REPO / "LLM_SERVING.md").read_text()
    for name in FIGURES:
        drawn, committed = (
            (folder / f"{name}.svg").read_text() for folder in (tmp_path, REPO / "docs" / "images")
        )
        assert drawn.count("<path") > 20 and f"(docs/images/{name}.svg)" in text
        if maker(drawn) == maker(committed):  # other versions draw elsewhere
            assert places(drawn) == pytest.approx(places(committed), abs=0.1), f"draw {name} anew"


def maker(svg: str) -> list[str]:
    return re.findall(r"Matplotlib v[\d.]+", svg)


def places(svg: str) -> list[float]:
    """Return the coordinates of all that a figure shows."""
    parts = " ".join(re.findall(r' (?:d|x|y)="([^"]*)"', svg))
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", parts)]


def test_what_makes_a_figure_better_is_green(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time per token is better, less goodput worse; an interval around 1 is grey."""
    effects = [
        {"factors": ["speculation"], "ratio": 0.5, "low": 0.4, "high": 0.6},
        {"factors": ["sharing"], "ratio": 2.0, "low": 1.5, "high": 2.5},
        {"factors": ["speculation", "sharing"], "ratio": 1.1, "low": 0.9, "high": 1.3},
    ]
    named = [{"name": name, "effects": effects} for name in ("goodput", "TPOT")]
    found = {"workload": "chat", "factors": ["speculation", "sharing"], "figures": named}
    monkeypatch.setattr(bench.figures, "_results", lambda name: {"findings": [found]})
    panels = Figure().subplots(1, 2)
    FIGURES["interactions"][1](panels)
    colours = [{text.get_text(): text.get_color() for text in panel.texts} for panel in panels]
    assert [colours[0][ratio] for ratio in ("0.50", "2.00", "1.10")] == [COLOURS[1], COLOURS[2], INK]
    assert [colours[1][ratio] for ratio in ("0.50", "2.00", "1.10")] == [COLOURS[2], COLOURS[1], INK]
