"""Configures tests on a host with an NVIDIA GPU: `python -m pytest tests/gpu -rs`.

Without a GPU each test is skipped with the reason. The tests do not need Ray.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.roofs import missing

HERE = Path(__file__).parent
COMPILED_S = 900
"""The timeout of a test. On its first run Triton compiles its kernels, some in a hundred random shapes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lack = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(COMPILED_S))
            if lack:
                item.add_marker(pytest.mark.skip(reason=lack))
