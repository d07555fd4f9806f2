"""Models that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.speculation.small_engine import write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a model and of one that drafts for it."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "target", folder / "draft")
    return folder / "target", folder / "draft"
