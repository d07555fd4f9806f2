"""MTP heads in the engine draft as the published formula does, for each family that brings them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig
from speculation.checkpoint import Checkpoint
from speculation.mtp_head import load_mtp
from speculation.tree_growth import TREE_WIDTH
from tests.e2e.architectures import VOCAB_SIZE
from tests.engine.kernels import needs_kernel
from tests.speculation.eagle_engine import Watched
from tests.speculation.mtp_files import FAMILIES, publish, quantize, store
from tests.speculation.small_engine import prompt_of
from tests.worker.tiny_model import greedy


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "step3p7"])
def test_drafts_equal_the_formulas(name: str, tmp_path: Path) -> None:
    published = publish(name, tmp_path)
    watched = Watched(tmp_path, tmp_path, num_tokens=4, method="mtp")
    prompt = prompt_of(37, vocab_size=VOCAB_SIZE)  # two chunks
    watched.ask("a", prompt, 8)
    assert watched.run()["a"] == greedy(published.target, prompt, 8)
    watched.assert_drafts(published.draft)


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2"])
def test_several_heads_after_hand_offs_and_prefix_hits(name: str, tmp_path: Path) -> None:
    """A hand-off brings all heads' hidden states. After a prefix hit those of the first place are missing. A
    third head is not loaded for two tokens.
    """
    published = publish(name, tmp_path)
    prefill, decode = (Watched(tmp_path, tmp_path, num_tokens=2, method="mtp") for _ in range(2))
    assert len(decode.engine.pool.layers("draft")) == 2
    prompt = prompt_of(45, vocab_size=VOCAB_SIZE)
    first, _ = prefill.hand_over(decode, prompt, 6)
    assert first + decode.run()["a"] == greedy(published.target, prompt, 6)
    assert len(decode.drafts[0][1]) == len(prompt) + 1
    decode.assert_drafts(published.draft)
    decode.drafts.clear()
    decode.ask("b", prompt[:32] + prompt_of(6, 8, VOCAB_SIZE), 6)
    decode.run()
    decode.assert_drafts(partial(published.draft, lost=32))


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2", "step3p7"])
def test_trees_of_several_heads(name: str, tmp_path: Path) -> None:
    """Each node is among the likeliest tokens after its parent, by the formula."""
    published = publish(name, tmp_path)
    watched = Watched(tmp_path, tmp_path, num_tokens=4, tree_nodes=12, method="mtp")
    watched.ask("a", prompt_of(26, vocab_size=VOCAB_SIZE), 12)
    watched.run_steps(4)
    depths = set()
    for (_, token_ids, tokens), draft in zip(watched.drafts, watched.trees, strict=True):
        assert draft.parents is not None
        paths: list[list[int]] = []
        for token, parent in zip(tokens, draft.parents, strict=True):
            before = [] if parent < 0 else paths[parent]
            paths.append([*before, token])
            logits = published.logits(token_ids, before)
            assert (logits > logits[token]).sum() < TREE_WIDTH
            depths.add(len(before))
    assert depths >= {0, 1, 2}


NATIVE = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "mimo")


@needs_kernel
@pytest.mark.parametrize("name", NATIVE)
def test_native_rows_equal_torchs(name: str, tmp_path: Path) -> None:
    publish(name, tmp_path)
    watched = Watched(tmp_path, tmp_path, method="mtp", dtype="bfloat16", compile="auto")
    program = load_mtp(Checkpoint(str(tmp_path)), watched.target, SpeculativeConfig(method="mtp")).program()
    watched.assert_native_rows(program, 64, tolerance=0.03)
    head: Any = watched.drafter._runner
    assert head._description.model.head.quantized, "it drafts with the target's LM head in bfloat16"


def test_a_head_in_fp8_blocks(tmp_path: Path) -> None:
    """The layer's linear layers are quantized, the joint product is not, as DeepSeek's."""
    published = publish("qwen3_5", tmp_path)
    quantize(published, tmp_path)
    watched = Watched(tmp_path, tmp_path, num_tokens=3, method="mtp")
    watched.ask("a", prompt_of(20, vocab_size=VOCAB_SIZE), 8)
    watched.run()
    watched.assert_drafts(published.draft)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"mtp.layers.0.mlp.up_proj.weight": None}, r"mtp\.layers\.0\.mlp\.up_proj\.weight: is missing"),
        ({"mtp.fc.weight": torch.zeros(64, 64)}, r"mtp\.fc\.weight: has shape \[64, 64\], not \[64, 128\]"),
        ({"mtp.norm.weight": None}, r"its checkpoint has no MTP head: none of mtp\.fc\.weight, "),
    ],
)
def test_a_damaged_head_is_refused(
    changed: dict[str, torch.Tensor | None], complaint: str, tmp_path: Path
) -> None:
    published = publish("qwen3_5", tmp_path)
    for name, tensor in changed.items():
        published.tensors.pop(name)
        if tensor is not None:
            published.tensors[name] = tensor
    store(tmp_path, published.tensors)
    with pytest.raises(ConfigError, match=complaint):
        Watched(tmp_path, tmp_path, method="mtp")
