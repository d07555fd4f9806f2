"""EAGLE in the engine: drafts equal a plain reference's, whatever is accepted, shared, preempted or moved."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.copies import upload_to
from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from engine.step.speculation_interface import MakeRoom
from protocol.sampling import SamplingParams
from speculation.control.controller import DraftController
from speculation.drafter import ComputedRows, HiddenRows
from speculation.drawing import rank
from speculation.target_states import DraftedKv
from tests.speculation import eagle_files as files
from tests.speculation.eagle_engine import Watched
from tests.speculation.eagle_reference import PlainHead
from tests.speculation.host_trees import grow_trees
from tests.speculation.small_engine import prompt_of as any_prompt
from tests.worker.tiny_model import greedy

CPU = torch.device("cpu")
prompt_of = partial(any_prompt, vocab_size=files.VOCAB)
FORMATS: dict[str, Callable[[Path], files.Published]] = {
    "eagle1-bin": lambda target: files.eagle1(target),
    "eagle1-safetensors-no-bias": lambda target: files.eagle1(target, bias=False, file="model.safetensors"),
    "official": lambda _: files.eagle3(),
    "official-full-vocabulary": lambda _: files.eagle3(reduced=False),
    "official-own-width": lambda _: files.eagle3(width=40),
    "official-theta-of-the-target": lambda _: files.eagle3(theta=None),
    "specforge": lambda _: files.specforge(),
    "specforge-3.1": lambda _: files.specforge(fc_norm=True, norm_output=True),
    "speculators": lambda _: files.speculators(),
    "speculators-3.1": lambda _: files.speculators(norm_before_fc=True, norm_output=True),
    "speculators-qwen3": lambda _: files.speculators(head_norms=True, reduced=False),
    "without-aux": lambda _: files.without_aux(),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    files.write_target(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.eagle3().write(tmp_path_factory.mktemp("official"))


def assert_as_plain(watched: Watched, plain: PlainHead, first_row: int = 0) -> None:
    assert watched.drafts
    for request_id, token_ids, drafted in watched.drafts:
        expected = plain.draft(token_ids, len(drafted), first_row)
        assert drafted == expected, f"{request_id} after {len(token_ids)} tokens"


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_of_published_formats_equal_the_references(
    name: str, target: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    published = FORMATS[name](target)
    watched = Watched(target, published.write(tmp_path / "head"), num_tokens=3)
    prompt = prompt_of(37)  # two chunks
    watched.ask("a", prompt, 8)
    assert watched.run()["a"] == greedy(model, prompt, 8)
    assert_as_plain(watched, PlainHead(published, model, files.THETA))


@pytest.mark.parametrize("accepted", [0, 4, "mixed"])
def test_bug_19_true_features_replace_the_heads_own(
    accepted: int | str, target: Path, model: PreTrainedModel, official: Path
) -> None:
    watched = Watched(target, official)
    prompts = {"a": prompt_of(9, 1), "b": prompt_of(30, 2), "c": prompt_of(50, 3)}
    for request_id, prompt in prompts.items():
        watched.answers[request_id] = prompt + greedy(model, prompt, 32)
        watched.ask(request_id, prompt, 24)
    rng = random.Random(5)
    watched.correct = lambda _: rng.randrange(5) if accepted == "mixed" else int(accepted)
    outputs = watched.run()
    for request_id, prompt in prompts.items():
        assert outputs[request_id] == watched.answers[request_id][len(prompt) :][:24]
    assert_as_plain(watched, PlainHead(files.eagle3(), model, files.THETA))
    assert not watched.drafter._known


class Steps:
    """Counts an engine's steps. Before each it calls `begin`; if that returns False, no request drafts."""

    def __init__(self, watched: Watched, begin: Callable[[int, ScheduledStep], bool]) -> None:
        self.count = 0
        self._begin, speculator = begin, watched.engine._speculator
        assert speculator is not None
        self._prepare, speculator.prepare = speculator.prepare, self.prepare  # type: ignore[method-assign]

    def prepare(self, step: ScheduledStep, num_active: int, make_room: MakeRoom) -> bool:
        self.count += 1
        return self._prepare(step, num_active, make_room if self._begin(self.count, step) else no_room)


def no_room(step: ScheduledStep, sequence: SequenceState, wish: int) -> int:
    return 0


def drafts_if(monkeypatch: pytest.MonkeyPatch, drafts: Callable[[], bool]) -> None:
    """Let the controller's plans draft only if `drafts()` is true."""
    chosen = property(lambda self: drafts(), lambda self, value: None)
    monkeypatch.setattr(DraftController, "drafts", chosen, raising=False)


def test_steps_without_drafts_are_caught_up(
    target: Path, model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculation.target_states.MOST_UNREAD", 8)
    watched = Watched(target, official)
    prompt = prompt_of(20)
    watched.ask("a", prompt, 40)

    def late(number: int, step: ScheduledStep) -> bool:
        known = watched.drafter._known.get("a")
        assert number >= 26 or known is None or known.end - known.written <= 9, "more is kept than may be"
        return number >= 26

    Steps(watched, late)
    assert watched.run()["a"] == greedy(model, prompt, 40)
    assert len(watched.drafts[0][1]) > 40
    assert_as_plain(watched, PlainHead(files.eagle3(), model, files.THETA))


def test_drafts_continue_after_steps_that_were_not_read(
    target: Path, model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(target, official)
    prompt = prompt_of(20)
    watched.ask("a", prompt, 40)
    resumed: list[int] = []
    seen: list[tuple[int, bool]] = []

    def begin(number: int, step: ScheduledStep) -> bool:
        if number == 14:
            resumed.append(len(step.sequences[0].token_ids))
        if known := watched.drafter._known.get("a"):
            seen.append((known.first, known.is_blind))
        return not 6 <= number < 16

    steps = Steps(watched, begin)
    drafts_if(monkeypatch, lambda: not 6 <= steps.count < 14)
    assert watched.run()["a"] == greedy(model, prompt, 40)
    lengths = [len(token_ids) for _, token_ids, _ in watched.drafts]
    assert min(lengths) == 21
    assert max(lengths) > 40
    assert (seen[0], seen[-1]) == ((1, False), (resumed[0], True))
    assert [draft.is_blind for draft in watched.trees] == [length > resumed[0] for length in lengths]


def test_unread_steps_are_read_when_drafts_resume(
    target: Path, model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(target, official)
    for name, length in (("a", 20), ("b", 31)):
        watched.ask(name, prompt_of(length, seed=length), 48)

    def drafts(number: int, step: object = None) -> bool:
        return not (6 <= number < 16 or 22 <= number < 28)

    steps = Steps(watched, drafts)
    drafts_if(monkeypatch, lambda: drafts(steps.count))
    outputs = watched.run()
    for name, length in (("a", 20), ("b", 31)):
        assert outputs[name] == greedy(model, prompt_of(length, seed=length), 48)
    assert not any(draft.is_blind for draft in watched.trees)
    assert_as_plain(watched, PlainHead(files.eagle3(), model, files.THETA))


def test_rows_made_useless_by_a_gap_are_not_written(
    target: Path, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and a later step are read together, and none of their rows is left to write."""
    watched = Watched(target, official)
    watched.ask("a", prompt_of(20), 4)
    drafter = watched.drafter
    drafter._known["a"] = known = DraftedKv(first=1, written=1)
    written: list[object] = []
    monkeypatch.setattr(drafter, "_write", written.append)
    sequence: Any = next(iter(watched.engine.sequences.values()))
    hidden = torch.zeros(21, drafter._no_feature.of_step.shape[1])
    prompt = ComputedRows(sequence, 0, 20, HiddenRows(hidden, range(20)))
    later = ComputedRows(sequence, 25, 1, HiddenRows(hidden, range(20, 21)))
    drafter.observe([prompt, later])
    assert not written
    assert (known.first, known.written, known.end) == (26, 26, 27)


def test_drafts_after_unread_prompts_are_blind_and_change_no_token(
    target: Path, model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(target, official)
    speculator: Any = watched.engine._speculator
    wants_hidden = speculator._wants_hidden
    steps = Steps(watched, lambda number, step: number > 6)
    drafts_if(monkeypatch, lambda: steps.count >= 7)
    speculator._wants_hidden = lambda step: step.only_decodes and wants_hidden(step)
    prompt = prompt_of(30)
    watched.ask("a", prompt, 40)
    assert watched.run()["a"] == greedy(model, prompt, 40)
    assert watched.trees and all(draft.is_blind for draft in watched.trees)
    assert watched.drafter.num_drafted("a") == 0


@pytest.mark.parametrize("reads", [True, False])
def test_a_prompt_is_read_for_a_fixed_number_of_tokens(
    reads: bool, target: Path, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under any load, since fixed drafts need not pay."""
    monkeypatch.setattr(DraftController, "reads_prompts", lambda *arguments: reads)
    watched = Watched(target, official)
    watched.ask("a", prompt_of(30), 10)
    watched.run()
    assert watched.trees and not any(draft.is_blind for draft in watched.trees)


def test_prefix_hit_keeps_the_draft_kv(target: Path, model: PreTrainedModel, official: Path) -> None:
    """Only the last cached token's hidden state is missing. The drafts equal those without the cache."""
    watched = Watched(target, official)
    prompt = prompt_of(40)
    watched.ask("first", prompt, 8)
    watched.run()
    watched.drafts.clear()
    longer = prompt[:32] + prompt_of(6, 8)
    watched.ask("second", longer, 6)
    watched.engine.step()
    assert watched.drafter._known["second"].first == 1
    watched.run()
    plain = PlainHead(files.eagle3(), model, files.THETA)
    features = plain.features
    hidden_row = len(longer[:32]) - 1

    def without_one(token_ids: list[int]) -> torch.Tensor:
        return features(token_ids).index_fill(0, torch.tensor(hidden_row), 0.0)

    plain.features = without_one  # type: ignore[method-assign]
    assert_as_plain(watched, plain)


def test_a_fully_cached_prompt_lacks_nothing(target: Path, model: PreTrainedModel, official: Path) -> None:
    watched = Watched(target, official)
    for seed in range(4):
        for turn in ("first", "second"):
            watched.ask(f"{turn} {seed}", prompt_of(24, seed), 12)
            watched.run()
    assert_as_plain(watched, PlainHead(files.eagle3(), model, files.THETA))


def test_blocks_without_draft_kv_are_not_read(target: Path, model: PreTrainedModel, official: Path) -> None:
    watched = Watched(target, official)
    prompt = prompt_of(40)
    watched.ask("a", prompt, 6)
    watched.run()
    watched.drafts.clear()
    watched.engine.blocks.drafted[:] = [False] * watched.engine.blocks.num_blocks
    watched.engine.pool.segment("draft").fill_(1e3)
    watched.ask("b", prompt[:32] + prompt_of(6, 8), 6)
    watched.engine.step()
    assert watched.drafter._known["b"].first == 32
    outputs = watched.run()
    assert all(0 <= token < files.VOCAB for token in outputs["b"])
    features = PlainHead(files.eagle3(), model, files.THETA).features
    plain = PlainHead(files.eagle3(), model, files.THETA)
    plain.features = (  # type: ignore[method-assign]
        lambda token_ids: features(token_ids).index_fill(0, torch.tensor(31), 0.0)
    )
    assert_as_plain(watched, plain, first_row=31)


@pytest.mark.parametrize("uncomputed", [0, 5])
def test_a_handed_over_request_drafts_at_once(
    target: Path, model: PreTrainedModel, official: Path, uncomputed: int
) -> None:
    """The decode worker's first draft is the same as if it had computed the prompt."""
    prefill, decode = Watched(target, official), Watched(target, official)
    prompt = prompt_of(45)
    first, state = prefill.hand_over(decode, prompt, 6, uncomputed)
    assert (state.kind, state.num_tokens) == ("carried", len(prompt))
    assert first + decode.run()["a"] == greedy(model, prompt, 6)
    assert len(decode.drafts[0][1]) == len(prompt) + (2 if uncomputed else 1)
    assert_as_plain(decode, PlainHead(files.eagle3(), model, files.THETA))


def test_sampled_drafts_have_the_targets_noise(target: Path, model: PreTrainedModel, official: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
    watched = Watched(target, official, num_tokens=3)
    prompt = prompt_of(12)
    watched.ask("a", prompt, 8, sampling={"temperature": 0.8, "top_p": 0.9, "seed": 11})
    watched.run()
    plain = PlainHead(files.eagle3(), model, files.THETA)
    sampler = Sampler(files.VOCAB, "cpu", [])
    for _, token_ids, drafted in watched.drafts:
        for index, token in enumerate(drafted):
            logits = plain.logits(token_ids, drafted[:index])
            row = SamplingRow(params, prompt, [], len(token_ids) + index, "a")
            assert sampler.sample(logits[None], [row]).token_ids == [token]


@pytest.mark.parametrize(("temperature", "decision"), [(0.0, 0.01), (0.9, 0.05)])
def test_trees_grow_along_the_likeliest_paths(
    temperature: float, decision: float, target: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """The head is undecided, so trees are wide."""
    published = files.eagle3()
    published.tensors["lm_head.weight"] *= decision
    watched = Watched(target, published.write(tmp_path), num_tokens=4, tree_nodes=14)
    prompts = {"a": prompt_of(12), "b": prompt_of(29, 4)}
    sampling = {"temperature": temperature, "seed": 3}
    for request_id, prompt in prompts.items():
        watched.ask(request_id, prompt, 20, sampling=sampling)
    outputs = watched.run()
    if temperature == 0:
        assert all(outputs[name] == greedy(model, prompt, 20) for name, prompt in prompts.items())
    params = SamplingParams(max_tokens=20, **sampling)
    plain = PlainHead(published, model, files.THETA)
    assert any(len(set(draft.parents or [])) > 3 for draft in watched.trees)
    for (_, token_ids, _), draft in zip(watched.drafts[:8], watched.trees[:8], strict=True):
        after = partial(ranked_after, plain, params, token_ids)
        (expected,), _ = grow_trees([len(draft.token_ids)], 4, 4, after)
        assert expected is not None
        assert (draft.token_ids, draft.parents) == (expected.token_ids, expected.parents)


def ranked_after(
    plain: PlainHead, params: SamplingParams, token_ids: list[int], tree: int, path: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    logits, positions = plain.logits(token_ids, [*path])[None], [len(token_ids) + len(path)]
    scores, tokens = rank(logits, [params], positions, upload_to(CPU), with_noise=True)
    return scores[0], tokens[0]


def test_rejection_sampling_gets_the_drafts_distributions(
    target: Path, model: PreTrainedModel, official: Path
) -> None:
    watched = Watched(target, official, num_tokens=3, verification="standard")
    watched.ask("a", prompt_of(12), 8, sampling={"temperature": 0.8, "seed": 1})
    watched.run()
    plain = PlainHead(files.eagle3(), model, files.THETA)
    for (_, token_ids, drafted), draft in zip(watched.drafts, watched.trees, strict=True):
        expected = [
            (plain.logits(token_ids, drafted[:place]) / 0.8).softmax(-1) for place in range(len(drafted))
        ]
        assert draft.distributions is not None
        torch.testing.assert_close(draft.distributions, torch.stack(expected), atol=1e-4, rtol=1e-3)
