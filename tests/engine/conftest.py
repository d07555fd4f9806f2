from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.quick_starts import quick_starts  # noqa: F401


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
