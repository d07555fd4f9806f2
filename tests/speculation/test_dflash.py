"""DFlash: published layouts draft as a plain reference does. See `test_drafters.py`, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.load.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from speculation.dflash_weights import load_dflash
from tests.speculation import dflash_files as files
from tests.speculation import eagle_files
from tests.speculation.dflash_files import PlainBlock
from tests.speculation.eagle_engine import Watched
from tests.speculation.small_engine import prompt_of as any_prompt
from tests.worker.tiny_model import greedy

prompt_of = partial(any_prompt, vocab_size=eagle_files.VOCAB)
FORMATS: dict[str, Callable[[], eagle_files.Published]] = {
    "original": files.dflash,
    "window": lambda: files.dflash("sf"),
    "window, whole": lambda: files.dflash("sf", is_causal=False),
    "speculators": files.speculators,
    "speculators, window": lambda: files.speculators("fs"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.dflash("sf").write(tmp_path_factory.mktemp("original"))


def watch(deep_target: Path, draft: Path, num_tokens: int = files.BLOCK - 1, **options: Any) -> Watched:
    return Watched(deep_target, draft, num_tokens, method="dflash", **options)


@pytest.mark.parametrize(("name", "compile"), [*((name, "auto") for name in FORMATS), ("window", "off")])
def test_drafts_of_published_formats_equal_the_references(
    name: str, compile: str, deep_target: Path, deep_model: PreTrainedModel, tmp_path: Path
) -> None:
    published = FORMATS[name]()
    watched = watch(deep_target, published.write(tmp_path / "draft"), compile=compile)
    assert watched.drafter._runner.choice.startswith("native" if compile == "auto" else "eager")
    prompts = {"a": prompt_of(37), "b": prompt_of(11, 2)}  # two chunks of one, beside the other
    for request_id, prompt in prompts.items():
        watched.ask(request_id, prompt, 6)
    outputs = watched.run()
    assert all(outputs[name] == greedy(deep_model, prompt, 6) for name, prompt in prompts.items())
    watched.assert_drafts(PlainBlock(published, deep_model, whole="whole" in name).draft)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (
            {"dflash_config": {"mask_token_id": 160, "target_layer_ids": [0, 3, 5]}},
            "mask_token_id 160 is not among",
        ),
        (
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 3, 8]}},
            r"target_layer_ids must be a list",
        ),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 3]}}, r"fc\.weight has the shape"),
        ({"block_size": 1}, "block_size must be a whole number of at least 2, got 1"),
        ({"use_swa": True}, "use_swa must be False, got True"),
        ({"num_hidden_layers": 1}, r"layer_types must have 1 entries, has 2"),
        ({"layer_types": None, "num_hidden_layers": 1}, r"layers\.1\..* is no part of the draft"),
        ({"hidden_size": 40}, "hidden_size must be the model's 32, got 40"),
    ],
)
def test_drafters_that_do_not_fit_are_named(
    spoil: dict[str, Any], complaint: str, deep_target: Path, tmp_path: Path
) -> None:
    loaded = load_model(ServeConfig(model=str(deep_target), dtype="float32", device="cpu"))
    with pytest.raises(ConfigError, match=complaint):
        load_dflash(str(files.dflash("sf", **spoil).write(tmp_path)), loaded)


def test_a_rounded_drafter_drafts(deep_target: Path, deep_model: PreTrainedModel, original: Path) -> None:
    watched = watch(deep_target, original, quantization="int8")
    watched.ask("a", prompt_of(37), 10)
    assert watched.run()["a"] == greedy(deep_model, prompt_of(37), 10)
    plain = PlainBlock(files.dflash("sf"), deep_model)
    agreed = [drafted[0] == plain.draft(token_ids, 5)[0] for _, token_ids, drafted in watched.drafts]
    assert sum(agreed) > len(agreed) / 2
