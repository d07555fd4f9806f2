"""The figures of LLM_SERVING.md can be drawn from the committed results, and are the committed ones."""

from bench.figures import FIGURES, figures
from bench.report import REPO


def test_every_figure_is_drawn_and_shown(tmp_path):
    figures(tmp_path)
    text = (REPO / "LLM_SERVING.md").read_text()
    for name in FIGURES:
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert drawn.count("<path") > 20 and f"(docs/images/{name}.svg)" in text
