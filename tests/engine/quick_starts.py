"""For packages whose tests make hundreds of engines: at a start each of its steps is run once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.step import calibration


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> Iterator[None]:
    """What a step takes, for which the fastest of several counts elsewhere, decides no token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_RUNS", 1)
        yield
