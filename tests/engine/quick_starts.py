"""Speeds up tests that make hundreds of engines: each step at an engine's start runs once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.step import profiling


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """Measure each kind of step once instead of taking the fastest of several runs. No token
    depends on it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "_RUNS", 1)
        yield
