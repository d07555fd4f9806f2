"""DFlash in the engine: drafts equal a plain reference's, whatever is accepted, shared or moved."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.load.loader import load_model
from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams
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
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    eagle_files.write_target(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.dflash("sf").write(tmp_path_factory.mktemp("original"))


def watch(target: Path, draft: Path, num_tokens: int = files.BLOCK - 1, **options: Any) -> Watched:
    return Watched(target, draft, num_tokens, method="dflash", **options)


def assert_as_plain(watched: Watched, plain: PlainBlock, first: int = 0) -> None:
    assert watched.drafts
    for request_id, token_ids, drafted in watched.drafts:
        expected = plain.draft(token_ids, len(drafted), first)
        assert drafted == expected, f"{request_id} after {len(token_ids)} tokens"


@pytest.mark.parametrize(("name", "compile"), [*((name, "auto") for name in FORMATS), ("window", "off")])
def test_drafts_of_published_formats_equal_the_references(
    name: str, compile: str, target: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    published = FORMATS[name]()
    watched = watch(target, published.write(tmp_path / "draft"), compile=compile)
    assert watched.drafter._runner.choice.startswith("native" if compile == "auto" else "eager")
    prompts = {"a": prompt_of(37), "b": prompt_of(11, 2)}  # two chunks of one, beside the other
    for request_id, prompt in prompts.items():
        watched.ask(request_id, prompt, 6)
    outputs = watched.run()
    assert all(outputs[name] == greedy(model, prompt, 6) for name, prompt in prompts.items())
    assert_as_plain(watched, PlainBlock(published, model, whole="whole" in name))


@pytest.mark.parametrize("accepted", [0, 5, "mixed"])
def test_the_context_follows_what_is_accepted(
    accepted: int | str, target: Path, model: PreTrainedModel, original: Path
) -> None:
    watched = watch(target, original)
    prompts = {"a": prompt_of(9, 1), "b": prompt_of(30, 2)}
    for request_id, prompt in prompts.items():
        watched.answers[request_id] = prompt + greedy(model, prompt, 24)
        watched.ask(request_id, prompt, 12)
    rng = random.Random(5)
    watched.correct = lambda _: rng.randrange(6) if accepted == "mixed" else int(accepted)
    outputs = watched.run()
    for request_id, prompt in prompts.items():
        assert outputs[request_id] == watched.answers[request_id][len(prompt) :][:12]
    lengths = {len(drafted) for _, _, drafted in watched.drafts}
    assert len(lengths) > 1, "requests near their end draft fewer tokens"
    assert_as_plain(watched, PlainBlock(files.dflash("sf"), model))
    assert not watched.drafter._known


def test_cached_prompts_keep_their_draft_kv(target: Path, model: PreTrainedModel, original: Path) -> None:
    """Whole prompts, and the first blocks of longer ones."""
    watched = watch(target, original)
    for turn in ("first", "second"):
        watched.ask(turn, prompt_of(24), 12)
        watched.run()
    watched.ask("longer", prompt_of(24) + prompt_of(9, 8), 6)
    watched.engine.step()
    assert watched.engine.stats().prefix_hit_tokens >= 24
    assert watched.drafter._known["longer"].first == 0
    watched.run()
    assert_as_plain(watched, PlainBlock(files.dflash("sf"), model))


def test_blocks_without_draft_kv_are_not_read(target: Path, model: PreTrainedModel, original: Path) -> None:
    watched = watch(target, original)
    watched.ask("a", prompt_of(40), 6)
    watched.run()
    watched.drafts.clear()
    watched.engine.blocks.drafted[:] = [False] * watched.engine.blocks.num_blocks
    watched.engine.pool.segment("draft").fill_(1e3)
    watched.ask("b", prompt_of(40)[:32] + prompt_of(6, 8), 6)
    watched.run()
    assert all(draft.is_blind for draft in watched.trees[-len(watched.drafts) :])
    assert_as_plain(watched, PlainBlock(files.dflash("sf"), model), first=32)


def test_steps_without_drafts_are_caught_up(
    target: Path, model: PreTrainedModel, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.target_states.MOST_UNREAD", 8)
    watched = watch(target, original)
    prompt = prompt_of(20)
    watched.ask("a", prompt, 28)
    speculator: Any = watched.engine._speculator
    prepare, number = speculator.prepare, itertools.count(1)
    speculator.prepare = lambda step, active, room: prepare(
        step, active, room if next(number) >= 20 else lambda *_: 0
    )
    assert watched.run()["a"] == greedy(model, prompt, 28)
    assert len(watched.drafts[0][1]) > 36
    assert_as_plain(watched, PlainBlock(files.dflash("sf"), model))


@pytest.mark.parametrize("uncomputed", [0, 5])
def test_a_handed_over_request_drafts_at_once(
    target: Path, model: PreTrainedModel, original: Path, uncomputed: int
) -> None:
    """The decode worker's first draft is the same as if it had computed the prompt."""
    prefill, decode = watch(target, original), watch(target, original)
    prompt = prompt_of(45)
    prefill.ask("a", prompt, 6, prefill_only=True)
    first = prefill.run_steps(4)["a"]
    reservation = decode.engine.reserve(prefill.engine.sequences["a"].request)
    assert reservation is not None
    source = prefill.engine.computed("a")[0].blocks
    decode.engine.pool.memory[reservation.sequence_blocks.blocks[0]] = prefill.engine.pool.memory[source]
    state = prefill.engine.draft_state("a")
    assert (state.kind, state.num_tokens) == ("carried", len(prompt))
    decode.engine.activate(reservation, first[0], len(prompt) - uncomputed, draft=state)
    assert first + decode.run()["a"] == greedy(model, prompt, 6)
    assert len(decode.drafts[0][1]) == len(prompt) + (2 if uncomputed else 1)
    assert_as_plain(decode, PlainBlock(files.dflash("sf"), model))


@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_sampled_drafts_have_the_noise_of_their_position(
    verification: Any, target: Path, model: PreTrainedModel, original: Path
) -> None:
    """Rejection sampling gets the distributions that they were drawn from instead."""
    watched = watch(target, original, verification=verification)
    prompt, sampling = prompt_of(12), {"temperature": 0.8, "seed": 11}
    watched.ask("a", prompt, 8, sampling=sampling)
    watched.run()
    plain = PlainBlock(files.dflash("sf"), model)
    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
    sampler = Sampler(eagle_files.VOCAB, "cpu", [])
    for (_, token_ids, drafted), draft in zip(watched.drafts, watched.trees, strict=True):
        logits = plain.logits(token_ids, len(drafted))
        if verification == "standard":
            torch.testing.assert_close(draft.distributions, (logits / 0.8).softmax(-1), atol=1e-4, rtol=1e-3)
            continue
        for place, token in enumerate(drafted):
            row = SamplingRow(params, prompt, [], len(token_ids) + place, "a")
            assert sampler.sample(logits[place][None], [row]).token_ids == [token]


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
    spoil: dict[str, Any], complaint: str, target: Path, tmp_path: Path
) -> None:
    loaded = load_model(ServeConfig(model=str(target), dtype="float32", device="cpu"))
    with pytest.raises(ConfigError, match=complaint):
        load_dflash(str(files.dflash("sf", **spoil).write(tmp_path)), loaded)


def test_a_rounded_drafter_drafts(target: Path, model: PreTrainedModel, original: Path) -> None:
    watched = watch(target, original, quantization="int8")
    watched.ask("a", prompt_of(37), 10)
    assert watched.run()["a"] == greedy(model, prompt_of(37), 10)
    plain = PlainBlock(files.dflash("sf"), model)
    agreed = [drafted[0] == plain.draft(token_ids, 5)[0] for _, token_ids, drafted in watched.drafts]
    assert sum(agreed) > len(agreed) / 2
