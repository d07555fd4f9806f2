"""These run on a host with an NVIDIA GPU, by `python -m pytest tests/gpu -rs`; elsewhere each says why it is
skipped. They need no Ray.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.roofs import missing

HERE = Path(__file__).parent
COMPILED_S = 900
"""For a test. When it first runs, Triton compiles its kernels, some a hundred of random shapes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lack = missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(COMPILED_S))
            if lack:
                item.add_marker(pytest.mark.skip(reason=lack))
