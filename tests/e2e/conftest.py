from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from bench.shapes.tokenizer import save_tokenizer
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.worker.tiny_model import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama with a tokenizer, served under the name `model`."""
    folder = tmp_path_factory.mktemp("models") / "model"
    folder.mkdir()
    write_model("llama", folder)
    save_tokenizer(folder, VOCAB_SIZE, 512)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load(folder)
