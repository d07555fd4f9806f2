from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.server_process import write_served


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("models"))
