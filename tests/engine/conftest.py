from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.quick_starts import quick_starts  # noqa: F401

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama, which no test changes."""
    from tests.worker.tiny_model import write_tiny_llama

    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    """Load the model in `folder` with Transformers."""
    from tests.worker.tiny_model import load

    return load(folder)
