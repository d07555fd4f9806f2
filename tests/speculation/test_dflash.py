"""DFlash drafters and Gemma 4's assistants draft what plain references draft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    PreTrainedModel,
)

from engine.load.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from speculation.dflash_weights import load_dflash
from tests.e2e.architectures import SLIDING_WINDOW, VOCAB_SIZE, config_of, write_model
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


def write_assistant(folder: Path, **changes: Any) -> Gemma4AssistantForCausalLM:
    """Write a random assistant of two layers, one of each kind."""
    text = config_of(
        "gemma4_text",
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(4)
    fields: dict[str, Any] = {
        "backbone_hidden_size": 64,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
    }
    config = Gemma4AssistantConfig(text_config=text, **(fields | changes))
    assistant = Gemma4AssistantForCausalLM(config).eval()
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    assistant.save_pretrained(folder)
    return assistant


def watch_assistant(target: Path, assistant: Path) -> Watched:
    return Watched(target, assistant, num_tokens=3, method="mtp")


@torch.no_grad()
def draft(target: Any, assistant: Any, token_ids: list[int], count: int) -> list[int]:
    """Draft greedily as Transformers' `SinglePositionMultiTokenCandidateGenerator` does. Its cache keeps as
    many keys of a layer with a window as the window has beside a row's own.
    """
    outputs = target.model(torch.tensor([token_ids[:-1]]), return_shared_kv_states=True)
    shared = dict(outputs.shared_kv_states)
    shared["sliding_attention"] = tuple(
        states[:, :, 1 - SLIDING_WINDOW :] for states in shared["sliding_attention"]
    )
    hidden, token, drafted = outputs.last_hidden_state[:, -1:], token_ids[-1], []
    for _ in range(count):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            position_ids=torch.tensor([[len(token_ids) - 1]]),
            shared_kv_states=shared,
        )
        hidden, token = output.last_hidden_state, int(output.logits.argmax())
        drafted.append(token)
    return drafted


@pytest.mark.parametrize("ordered", [False, True])
def test_assistants_draft_as_in_transformers(ordered: bool, tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", use_ordered_embeddings=ordered)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    watched = watch_assistant(tmp_path / "target", tmp_path / "assistant")
    prompt = any_prompt(SLIDING_WINDOW + 20, vocab_size=VOCAB_SIZE)
    for _ in range(2):  # the second finds the prompt's blocks
        watched.ask("a", prompt, 10)
        assert watched.run()["a"] == greedy(target, prompt, 10)
    assert len(watched.drafts) > 8
    watched.assert_drafts(partial(draft, target, assistant))


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path / "target")
    write_assistant(tmp_path / "assistant", backbone_hidden_size=48)
    with pytest.raises(ConfigError, match="backbone_hidden_size must be the model's 64, got 48"):
        watch_assistant(tmp_path / "target", tmp_path / "assistant")
