"""Models that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from tests.engine.quick_starts import quick_starts  # noqa: F401
from tests.speculation import eagle_files
from tests.speculation.methods import ROOMY, SAMPLING, Given, requests, write_heads
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import run, small_config, write_pair


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


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folder of a model of eight layers, for which heads are published."""
    folder = tmp_path_factory.mktemp("deep")
    eagle_files.write_target(folder)
    return folder


@pytest.fixture(scope="session")
def deep_model(deep_target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(deep_target, dtype=torch.float32)


@pytest.fixture(scope="session")
def given(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Given:
    target, draft = pair
    return write_heads(tmp_path_factory.mktemp("heads"), small_config(target, ROOMY), draft, "fs", (1,))


@pytest.fixture(scope="session")
def plain(given: Given) -> dict[str, Answers]:
    """By kind of sampling: what `requests` get without speculation, alone and with room."""
    engine = Engine(given.config)
    return {
        sampling: {r.request_id: run(engine, [r])[r.request_id].token_ids for r in requests(sampling)}
        for sampling in SAMPLING
    }
