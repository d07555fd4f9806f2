"""A worker loads what grammars need before it serves: that stops all threads, heartbeats included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from engine.load.loader import keep_preloaded
from engine.sampler import grammars
from models.bundled import bundled_path
from protocol.config import ServeConfig
from tests.worker.harness import tiny_config
from worker.setup import build_engine, preload_models

LETTERS = "start: /[a-z]+/"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the vocabularies of the tokenizers that are loaded."""
    seen: list[int] = []

    def load(text: str, n_vocab: int, eos_token: list[int]) -> object:
        seen.append(n_vocab)
        return LLTokenizer(text, n_vocab, eos_token)

    monkeypatch.setattr(grammars, "LLTokenizer", load)
    grammars._load_vocabulary.cache_clear()
    yield seen
    grammars._load_vocabulary.cache_clear()


def test_a_template_loads_them_for_all_of_its_workers(loads: list[int]) -> None:
    config = ServeConfig(
        model=bundled_path("tandem-code-1m"), device="cpu", kv_cache_memory_bytes=2**23, max_model_len=64
    )
    try:
        assert preload_models(config)
        assert loads == [4096]
        engine, _ = build_engine(config)
    finally:
        keep_preloaded([])
    engine._grammars.compile(LETTERS).result()
    assert loads == [4096]


def test_a_worker_without_a_tokenizer_serves_all_the_same(model_folder: Path, loads: list[int]) -> None:
    engine, _ = build_engine(tiny_config(model_folder))
    with pytest.raises(grammars.InvalidRequestError, match="grammar: "):
        engine._grammars.compile(LETTERS).result()
    assert loads == []
