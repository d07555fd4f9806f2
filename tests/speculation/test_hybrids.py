"""Drafts for models with recurrent layers give the tokens of `transformers.generate`, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.engine import Engine
from engine.kv.state_slots import RecurrentLayer, StateLayout, StateSlots
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from speculation import self_speculative as self_drafter
from speculation.draft_model import DraftModel, DraftStateSlots
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import write_model
from tests.speculation import scripted
from tests.speculation.methods import CRAMPED, METHODS, Given, write_heads
from tests.speculation.methods import requests as sampled_requests
from tests.speculation.scripted import Answers, Script, ScriptedDrafter
from tests.speculation.small_engine import (
    VOCAB_SIZE,
    ask,
    drafted_and_accepted,
    drafting,
    prompt_of,
    run,
    small_config,
    tokens,
    write_noisy,
)
from tests.worker.tiny_model import greedy, load

MODELS = ["qwen3_next", "falcon_h1", "jamba", "lfm2"]
LENGTHS = [1, 14, 16, 31, 50]
"""Prompt lengths, so that drafts begin before, at and after grid points (multiples of 16)."""
NUM_TOKENS = 24


def config_of(model: Path, **options: Any) -> ServeConfig:
    room = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**22}
    return small_config(model, **(room | options))


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


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [("qwen3_next", 8), ("falcon_h1", 1), ("jamba", 8), ("lfm2", 32)],
    indirect=["model"],
)
def test_right_and_wrong_drafts_change_no_token(model: Path, answers: Answers, num_tokens: int) -> None:
    drafter = ScriptedDrafter(scripted.right(answers))
    engine = scripted.engine_with(config_of(model), drafter, num_tokens)
    for name, script in scripts(answers).items():
        drafter.script = script
        found = run(engine, requests())
        assert tokens(found) == answers, name
        drafted, accepted = drafted_and_accepted(found)
        assert (drafted > 0) == (name != "tree" or num_tokens > 1)
        assert (accepted > 0) == (name != "wrong" and drafted > 0)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    for model_type, name in (("qwen3_5_text", "target"), ("llama", "draft")):
        write_model(model_type, folder / name)
    limits = {"max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    config = config_of(folder / "target", compile="auto", **limits)
    return write_heads(folder, config, folder / "draft", "f", (1, 2))


@pytest.fixture(scope="module")
def plain(given: Given) -> Answers:
    return tokens(run(Engine(given.config), sampled_requests("seeded")))


def cramped(engine: Engine, num_blocks: int) -> ServeConfig:
    """Return a configuration with this number of blocks in addition to its state slots."""
    pool = engine.pool
    assert pool.state_slots is not None
    room = (
        engine.config.max_num_seqs * pool.state_slots.layout.state_slot_bytes
        + num_blocks * pool.memory.shape[1]
    )
    return replace(engine.config, kv_cache_memory_bytes=room, speculative_config=None)


CASES = [
    *((method, 4) for method in ("draft_model", "eagle tree", "medusa", "mtp", "dflash", "lookahead")),
    *((method, 8) for method in ("draft_model tree", "mtp tree")),
]
"""Methods with the most tokens that each drafts."""


@pytest.mark.parametrize(("method", "num_tokens"), CASES)
def test_every_method_drafts_and_changes_no_token(
    given: Given, plain: Answers, method: str, num_tokens: int
) -> None:
    """With 4 tokens room is so short that some requests are preempted."""
    given = replace(given, answers=plain, num_tokens=num_tokens)
    engine = METHODS[method](given)
    if num_tokens == 4:
        engine = METHODS[method](replace(given, config=cramped(engine, CRAMPED)))
    found = run(engine, sampled_requests("seeded"))
    assert tokens(found) == plain
    assert (engine.stats().num_preemptions > 0) == (num_tokens == 4)
    assert drafted_and_accepted(found)[1] > 0


def test_bfloat16_gives_the_same_bits_with_drafts_and_without(model: Path) -> None:
    def served(engine: Engine, num_requests: int) -> TokenOutput:
        name, *others = [each.request_id for each in requests()][::-1]
        longest = ask(name, requests()[-1].prompt_token_ids, NUM_TOKENS, ignore_eos=True, logprobs=3)
        mates = [each for each in requests() if each.request_id in others[: num_requests - 1]]
        return run(engine, [*mates, longest])[name]

    config = config_of(model, dtype="bfloat16", enable_prefix_caching=False)
    plain = Engine(config)
    alone = served(plain, 1)
    answers = tokens(run(plain, requests()))
    drafter = ScriptedDrafter(scripted.right(answers))
    engine = scripted.engine_with(config, drafter, 8)
    for name, num_requests in (("right", 1), ("wrong", len(LENGTHS)), ("mixed", len(LENGTHS)), ("tree", 1)):
        drafter.script = scripts(answers)[name]
        drafted = served(engine, num_requests)
        assert drafted.drafted_tokens > 0
        assert (drafted.token_ids, drafted.logprobs) == (alone.token_ids, alone.logprobs), name


def drafting_itself(config: ServeConfig, num_tokens: int, **options: Any) -> Engine:
    return drafting(config, method="self_speculative", num_speculative_tokens=num_tokens, **options)


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [("qwen3_next", 4), ("falcon_h1", 16), ("jamba", 4), ("lfm2", 16)],
    indirect=["model"],
)
def test_drafting_with_all_layers_is_always_right(
    model: Path, answers: Answers, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far its states lag behind. A draft from a wrong state would sometimes be wrong."""
    monkeypatch.setattr(self_drafter, "with_defaults", lambda options, *_, **__: options)
    found = run(drafting_itself(config_of(model), num_tokens), requests())
    assert tokens(found) == answers
    drafted, accepted = drafted_and_accepted(found)
    assert drafted == accepted > 60


def drafting_by(config: ServeConfig, draft: Path, num_tokens: int, **options: Any) -> Engine:
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens}
    return drafting(config, **asked, **options)


SKIPPING, EXITING = {"skip_layers": [1]}, {"exit_layer": 2}


@pytest.mark.parametrize(
    ("model", "options"), [("qwen3_next", SKIPPING), ("jamba", EXITING)], indirect=["model"], ids=str
)
def test_drafting_with_some_layers_changes_no_token(
    model: Path, answers: Answers, options: dict[str, Any]
) -> None:
    """The skipped layers' states must not fall behind."""
    found = run(drafting_itself(config_of(model), 4, **options), requests())
    assert tokens(found) == answers
    drafted, accepted = drafted_and_accepted(found)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_models_whose_layer_kind_depends_on_its_index_skip_no_layers(model: Path) -> None:
    with pytest.raises(ConfigError, match="skip_layers: the kinds of jamba's layers follow"):
        drafting_itself(config_of(model), 4, **SKIPPING)


def native_config(model: Path) -> ServeConfig:
    return config_of(model, dtype="bfloat16", compile="auto", max_num_batched_tokens=512, itl_budget=0.0)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"skip_layers": [1]}], ids=str)
def test_a_hybrid_in_the_native_decoder_drafts_for_itself(tmp_path: Path, options: dict[str, Any]) -> None:
    write_model("qwen3_5_text", tmp_path)
    config = native_config(tmp_path)
    found = run(drafting_itself(config, 5, **options), requests())
    assert tokens(found) == tokens(run(Engine(config), requests()))
    drafted, accepted = drafted_and_accepted(found)
    assert accepted > (drafted / 2 if "quantization" in options else 0)


@pytest.mark.parametrize("tree", [False, True])
def test_hybrids_in_the_native_decoder_draft_for_each_other(tmp_path: Path, tree: bool) -> None:
    write_model("qwen3_5_text", tmp_path / "target")
    write_noisy(tmp_path / "target", tmp_path / "draft")
    config = native_config(tmp_path / "target")
    expected = tokens(run(Engine(config), requests()))
    engine = drafting_by(config, tmp_path / "draft", 9 if tree else 5, tree=tree)
    found = run(engine, requests())
    assert tokens(found) == expected
    assert drafted_and_accepted(found)[1] > 30


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ServeConfig, Path, Answers]]:
    """Return a hybrid and a pure target, the hybrid that drafts for both, and the answers without drafts."""
    folder = tmp_path_factory.mktemp("drafts")
    made: dict[str, tuple[ServeConfig, Path, Answers]] = {}
    for name in ("qwen3_5_text", "llama"):
        write_model(name, folder / name)
        limits = {"max_model_len": 160, "max_num_batched_tokens": 512, "itl_budget": 0.0}
        config = config_of(folder / name, compile="auto", **limits)
        made[name] = config, folder / "draft", tokens(run(Engine(config), requests()))
    write_noisy(folder / "qwen3_5_text", folder / "draft")
    return made


Proposals = dict[tuple[int, ...], tuple[list[int], list[int] | None]]


@contextmanager
def recorded(engine: Engine, num_tokens: int) -> Iterator[Proposals]:
    """Record drafts by their text, each with room for `num_tokens` tokens."""
    assert isinstance(engine._speculator, BatchSpeculator)
    draft_model = engine._speculator._drafters["draft_model"]
    found: Proposals = {}

    def recording(sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        assert isinstance(draft_model, DraftModel)
        drafted = DraftModel.propose(draft_model, sequences, counts)
        for sequence, draft, count in zip(sequences, drafted, counts, strict=True):
            if draft is not None and count == num_tokens:
                found[(*sequence.token_ids,)] = draft.token_ids, draft.parents
        return drafted

    with mock.patch.object(draft_model, "propose", recording):
        yield found


def proposals(engine: Engine, asked: list[EngineRequest], num_tokens: int) -> tuple[Proposals, Answers]:
    """Return the drafts and the answers."""
    with recorded(engine, num_tokens) as found:
        return found, tokens(run(engine, asked))


def test_a_request_that_lost_its_state_slot_is_read_again(
    drafts: dict[str, tuple[ServeConfig, Path, Answers]],
) -> None:
    config, draft, _ = drafts["llama"]
    engine = drafting_by(replace(config, max_num_seqs=1), draft, 5)
    first, second = requests()[3:]
    expected, _ = proposals(engine, [first], 5)
    with recorded(engine, 5) as found:
        engine.add(first)
        for _ in range(4):
            engine.step()
        engine.scheduler.hold(engine.sequences[first.request_id])
        engine.add(second)
        while engine.has_work():
            engine.step()
        num_before = len(found)
        engine.resume(first.request_id)
        while engine.has_work():
            engine.step()
    after = list(found)[num_before:]
    assert len(after) >= 8 and {text: found[text] for text in after} == {
        text: expected[text] for text in after
    }


@pytest.mark.parametrize(("target", "tree"), [("qwen3_5_text", True), ("llama", False)])
def test_a_draft_with_recurrent_layers_returns_to_committed_tokens(
    drafts: dict[str, tuple[ServeConfig, Path, Answers]], target: str, tree: bool
) -> None:
    """After any rejection it drafts the same as after reading the text at once."""
    config, draft, expected = drafts[target]
    num_tokens = 9 if tree else 5
    options: dict[str, Any] = {"tree": True, "tree_nodes": num_tokens} if tree else {}
    engine = drafting_by(config, draft, num_tokens, **options)
    found, answers = proposals(engine, requests(), num_tokens)
    assert answers == expected
    again, _ = proposals(engine, requests(), num_tokens)  # with prefixes from the cache
    assert {text: again[text] for text in found.keys() & again.keys()} == found
    texts = sorted(found, key=len)[:: max(len(found) // 8, 1)]
    assert len(texts) >= 8
    anew = [ask(f"a{i}", [*text[:-1]], num_tokens + 2, ignore_eos=True) for i, text in enumerate(texts)]
    fresh, _ = proposals(drafting_by(config, draft, num_tokens, **options), anew, num_tokens)
    assert {text: fresh[text] for text in texts} == {text: found[text] for text in texts}


def test_a_request_without_a_state_slot_takes_one_of_an_idle_drafter() -> None:
    layout = StateLayout((RecurrentLayer(channels=4, taps=2),), torch.float32)
    state_slots = DraftStateSlots(StateSlots(layout, 2, torch.device("cpu")))
    assert state_slots.sit(["a", "b"]) == []
    assert state_slots.sit(["a"]) == []
    assert state_slots.sit(["c", "a"]) == ["b"]
    assert state_slots["a"] != state_slots["c"]
    state_slots.forget("a")
    state_slots.forget("b")
    assert state_slots.sit(["d", "c"]) == []


def test_states_are_not_handed_over(drafts: dict[str, tuple[ServeConfig, Path, Answers]]) -> None:
    config, draft, _ = drafts["llama"]
    with pytest.raises(ConfigError, match=r"prefill: .* must be auto or rebuild"):
        drafting_by(config, draft, 5, prefill="carry")
