from __future__ import annotations

from pathlib import Path

import pytest

from bench.shapes.tokenizer import save_tokenizer
from tests.worker.tiny_model import VOCAB_SIZE, write_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model with a tokenizer, which `tandem serve` can load."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_tiny_llama(folder)
    save_tokenizer(folder, VOCAB_SIZE, 1024)
    return folder
