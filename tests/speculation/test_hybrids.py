"""Drafts for models with recurrent layers: the tokens of `transformers.generate`, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from tests.e2e.architectures import write_model
from tests.speculation import scripted
from tests.speculation.scripted import Answers, Script, ScriptedDrafter
from tests.speculation.small_engine import VOCAB_SIZE, ask, prompt_of, run, tokens
from tests.speculation.test_token_equality import ALLOWED, CRAMPED, METHODS, Given
from tests.speculation.test_token_equality import requests as sampled_requests
from tests.worker.tiny_model import greedy, load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3
from training.heads.medusa import build_medusa

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers' recurrent layers call other functions",
)

MODELS = ["qwen3_next", "falcon_h1", "nemotron_h", "lfm2"]
LENGTHS = [1, 14, 16, 31, 50]
"""Of the prompts: drafts lie before, at and behind grid points (16)."""
NUM_TOKENS = 40


def config_of(model: Path, **options: Any) -> ServeConfig:
    config = ServeConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        compile="off",
        max_model_len=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**22,
    )
    return msgspec.structs.replace(config, **options)


def requests() -> list[EngineRequest]:
    return [
        ask(f"r{i}", prompt_of(length, i), NUM_TOKENS, ignore_eos=True) for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def answers(model: Path) -> Answers:
    reference = load(model)
    return {each.request_id: greedy(reference, each.prompt_token_ids, NUM_TOKENS) for each in requests()}


def scripts(answers: Answers) -> dict[str, Script]:
    return {
        "right": scripted.right(answers),
        "wrong": scripted.wrong_from(answers, 0, VOCAB_SIZE),
        "mixed": scripted.sometimes_right(answers, 0.8, VOCAB_SIZE),
        "tree": scripted.tree(answers, 0.8, VOCAB_SIZE),
    }


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 32])
def test_right_and_wrong_drafts_leave_the_tokens_as_they_are(
    model: Path, answers: Answers, num_tokens: int
) -> None:
    drafter = ScriptedDrafter(scripted.right(answers))
    engine = scripted.engine_with(config_of(model), drafter, num_tokens)
    for name, script in scripts(answers).items():
        drafter.script = script
        found = run(engine, requests())
        assert tokens(found) == answers, name
        drafted = sum(output.drafted_tokens for output in found.values())
        accepted = sum(output.accepted_tokens for output in found.values())
        assert (drafted > 0) == (name != "tree" or num_tokens > 1)
        assert (accepted > 0) == (name != "wrong" and drafted > 0)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    for model_type, name in (("qwen3_next", "target"), ("llama", "draft")):
        write_model(model_type, folder / name)
    model = load(folder / "target")
    size = model.config.vocab_size
    few = torch.zeros(size).index_fill(0, torch.tensor(ALLOWED), 1)
    build_eagle3(Target("tiny", model, few), HeadOptions(draft_vocab_size=len(ALLOWED))).save(
        folder / "eagle"
    )
    build_medusa(Target("tiny", model, torch.ones(size)), HeadOptions(depth=5)).save(folder / "medusa")
    config = config_of(folder / "target", max_model_len=256, max_num_batched_tokens=128, max_num_seqs=8)
    return Given(config, folder / "draft", folder / "eagle", folder / "medusa", {}, 0)


@pytest.fixture(scope="module")
def plain(given: Given) -> Answers:
    return tokens(run(Engine(given.config), sampled_requests("seeded")))


def cramped(engine: Engine, num_blocks: int) -> ServeConfig:
    """The configuration of one with so many blocks beside its seats."""
    pool = engine.pool
    assert pool.seats is not None
    room = engine.config.max_num_seqs * pool.seats.layout.seat_bytes + num_blocks * pool.arenas[0].shape[1]
    return msgspec.structs.replace(engine.config, kv_cache_memory_bytes=room, speculative_config=None)


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize(
    "method", [name for name in METHODS if name != "self_speculative" and "scripted" not in name]
)
def test_every_method_drafts_and_changes_no_token(
    given: Given, plain: Answers, method: str, num_tokens: int
) -> None:
    """Sampled and greedy, some of few tokens, so that even heads without training are right at times; and
    with so little room that some requests are preempted.
    """
    given = replace(given, answers=plain, num_tokens=num_tokens)
    engine = METHODS[method](given)
    if num_tokens == 4:
        engine = METHODS[method](replace(given, config=cramped(engine, CRAMPED)))
    found = run(engine, sampled_requests("seeded"))
    assert tokens(found) == plain
    assert (engine.stats().num_preemptions > 0) == (num_tokens == 4)
    assert sum(output.accepted_tokens for output in found.values()) > 0


def test_bfloat16_gives_the_same_bits_with_drafts_and_without(model: Path) -> None:
    def served(engine: Engine, num_requests: int) -> TokenOutput:
        name, *others = [each.request_id for each in requests()][::-1]
        longest = ask(name, requests()[-1].prompt_token_ids, NUM_TOKENS, ignore_eos=True, logprobs=3)
        mates = [each for each in requests() if each.request_id in others[: num_requests - 1]]
        return run(engine, [*mates, longest])[name]

    config = config_of(model, dtype="bfloat16")
    alone = served(Engine(config), 1)
    answers = tokens(run(Engine(config), requests()))
    for name, script in scripts(answers).items():
        for num_requests in (1, len(LENGTHS)):
            engine = scripted.engine_with(config, ScriptedDrafter(script), 8)
            drafted = served(engine, num_requests)
            assert drafted.drafted_tokens > 0
            assert (drafted.token_ids, drafted.logprobs) == (alone.token_ids, alone.logprobs), name
