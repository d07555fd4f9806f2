"""Drafts change no token: also of models with unlike layers, and with heads on one of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.speculation import Method, SpeculativeConfig
from tests.e2e.architectures import write_model
from tests.engine import parallel_child
from tests.engine.kernels import needs_kernel
from tests.engine.parallel_child import answer, in_child
from tests.speculation.methods import CHUNK, CRAMPED, METHODS, ROOMY, Given, requests
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import (
    ask,
    drafted_and_accepted,
    drafting,
    prompt_of,
    run,
    small_config,
    tokens,
    write_noisy,
)
from tests.worker.tiny_model import assert_greedy, load

CASES = [
    *((method, 5, "seeded", True) for method in METHODS),
    *((method, 8, "greedy", False) for method in METHODS if "tree" in method or method == "dflash"),
    *((method, 1, "seeded", False) for method in ("eagle", "scripted tree")),
    *((method, 1, "greedy", False) for method in ("draft_model tree", "lookahead")),
]


@pytest.mark.parametrize(("method", "num_tokens", "sampling", "cramped"), CASES)
def test_tokens_equal_those_without_speculation(
    given: Given, plain: dict[str, Answers], method: str, num_tokens: int, sampling: str, cramped: bool
) -> None:
    """First with an empty cache, then again with the prompts' blocks found there."""
    given = given.with_room(method, CRAMPED if cramped else ROOMY, max_num_batched_tokens=CHUNK)
    engine = METHODS[method](replace(given, answers=plain[sampling], num_tokens=num_tokens))
    for _ in range(2):
        hits, preemptions = engine.stats().prefix_hit_tokens, engine.stats().num_preemptions
        found = run(engine, requests(sampling))
        assert tokens(found) == plain[sampling]
        assert (engine.stats().num_preemptions > preemptions) == cramped
        assert drafted_and_accepted(found)[1] > 0
    assert engine.stats().prefix_hit_tokens > hits


LENGTHS, NUM_TOKENS = [1, 20, 40, 100], 24


@pytest.mark.parametrize(
    ("model_type", "is_tree"), [("gemma4_text", True), ("gpt_oss", True), ("deepseek_v3", False)]
)
def test_drafts_change_no_token(model_type: str, is_tree: bool, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    write_model(model_type, target)
    write_noisy(target, draft, 0.01)
    shape = {"tree": True, "tree_nodes": 12} if is_tree else {}
    engine = drafting(
        small_config(target, 400), method="draft_model", model=str(draft), num_speculative_tokens=4, **shape
    )
    reference = load(target)
    prompts = {f"r{i}": prompt_of(length, i) for i, length in enumerate(LENGTHS)}
    found = run(engine, [ask(name, prompt, NUM_TOKENS, ignore_eos=True) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_greedy(reference, prompt, found[name].token_ids, NUM_TOKENS)
    drafted, accepted = drafted_and_accepted(found)
    assert 0 < accepted < drafted


def test_models_with_shared_kv_cannot_draft_with_some_layers(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path)
    with pytest.raises(ConfigError, match="skip_layers: gemma4_text has layers that share their KV"):
        drafting(small_config(tmp_path), method="self_speculative", skip_layers=[1])


def tokens_of(results: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Return tokens alone: how many a step drafts depends on times."""
    return {name: [token for step in each[::2] for token in step] for name, each in results.items()}


HEADS: list[tuple[Method, int]] = [("eagle", 2), ("eagle", 4), ("mtp", 2), ("medusa", 4), ("dflash", 2)]


@needs_kernel
@pytest.mark.parametrize(("method", "size"), HEADS)
def test_heads_draft_on_rank_0(given: Given, method: Method, size: int) -> None:
    folder = {"eagle": given.head, "mtp": given.mtp, "medusa": given.medusa, "dflash": given.dflash}[method]
    asked = SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=4)
    config = msgspec.to_builtins(replace(given.config, dtype="bfloat16", speculative_config=asked))
    encoded = [msgspec.msgpack.encode(each) for each in requests("seeded", 16)]
    pipes = [in_child(parallel_child.run, config, each, "gloo", encoded) for each in (1, size)]
    (_, expected, _), (forward, results, _) = map(answer, pipes)
    assert forward.endswith(f"on {size} ranks")
    assert tokens_of(results) == tokens_of(expected)
    assert sum(accepted for each in results.values() for _, _, accepted in each[1::2]) > 0
