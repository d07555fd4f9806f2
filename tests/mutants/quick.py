"""A plugin of pytest: hypothesis tells a failure at once and looks for no smaller example."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)
    settings.load_profile("mutants")
