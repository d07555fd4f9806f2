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
from tests.speculation.dflash_files import dflash
from tests.speculation.methods import ALLOWED, ROOMY, SAMPLING, Given, requests
from tests.speculation.mtp_files import write_head
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import VOCAB_SIZE, run, small_config, write_pair
from tests.worker.tiny_model import load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3
from training.heads.medusa import build_medusa


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
    """Untrained heads: EAGLE and DFlash draft nothing but the few allowed tokens, so that some are right."""
    folder, (target, draft) = tmp_path_factory.mktemp("heads"), pair
    model, all_tokens = load(target), torch.ones(VOCAB_SIZE)
    few = torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor(ALLOWED), 1)
    torch.manual_seed(0)
    options = HeadOptions(draft_vocab_size=len(ALLOWED))
    build_eagle3(Target("tiny", model, few), options).save(folder / "eagle")
    build_medusa(Target("tiny", model, all_tokens), HeadOptions(depth=5)).save(folder / "medusa")
    dflash("fs", width=model.config.hidden_size, captured=(1,), ids=torch.tensor(ALLOWED)).write(
        folder / "dflash"
    )
    config = small_config(target, ROOMY)
    mtp = write_head(target, folder / "mtp")
    heads = (folder / name for name in ("eagle", "medusa", "dflash"))
    return Given(config, draft, *heads, mtp, answers={}, num_tokens=5)


@pytest.fixture(scope="session")
def plain(given: Given) -> dict[str, Answers]:
    """By kind of sampling: what `requests` get without speculation, alone and with room."""
    engine = Engine(given.config)
    return {
        sampling: {r.request_id: run(engine, [r])[r.request_id].token_ids for r in requests(sampling)}
        for sampling in SAMPLING
    }
