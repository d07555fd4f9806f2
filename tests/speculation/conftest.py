"""Models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.quick_starts import quick_starts  # noqa: F401
from tests.speculation.small_engine import write_pair


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread: tiny models gain nothing from more, and would wait for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write folders of a model and of one that drafts for it."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "target", folder / "draft")
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def target(pair: tuple[Path, Path]) -> Path:
    return pair[0]
