"""Gemma 4's assistants draft as Transformers' own modules do, over the KV that the engine keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from protocol.errors import ConfigError
from tests.e2e.architectures import SLIDING_WINDOW, VOCAB_SIZE, config_of, write_model
from tests.speculation.eagle_engine import Watched
from tests.speculation.small_engine import prompt_of
from tests.worker.tiny_model import greedy


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


def watch(target: Path, assistant: Path) -> Watched:
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
def test_drafts_are_those_of_transformers(ordered: bool, tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path / "target")
    assistant = write_assistant(tmp_path / "assistant", use_ordered_embeddings=ordered)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    watched = watch(tmp_path / "target", tmp_path / "assistant")
    prompt = prompt_of(SLIDING_WINDOW + 20, vocab_size=VOCAB_SIZE)
    for _ in range(2):  # the second finds the prompt's blocks
        watched.ask("a", prompt, 10)
        assert watched.run()["a"] == greedy(target, prompt, 10)
    assert len(watched.drafts) > 8
    watched.assert_drafts(partial(draft, target, assistant))


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path / "target")
    write_assistant(tmp_path / "assistant", backbone_hidden_size=48)
    with pytest.raises(ConfigError, match="backbone_hidden_size must be the model's 64, got 48"):
        watch(tmp_path / "target", tmp_path / "assistant")
