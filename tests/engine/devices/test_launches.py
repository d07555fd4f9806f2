"""Decode steps take few launches, and the host one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from tests.engine.launches import FAMILIES, LAYERS, launches_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "gpu.md"
MOST = 450


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_is_a_graph_of_as_many_launches_as_documented(family: str) -> None:
    found = launches_of(family)
    assert found.is_graph
    assert found.count <= MOST, f"{found.count} for {LAYERS} layers"
    assert f"| {family} | {found.forward} | {found.count} | yes |" in DOCUMENT.read_text()
