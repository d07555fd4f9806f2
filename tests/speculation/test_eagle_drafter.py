"""EAGLE in the engine: published formats, gaps in what it reads, and trees. See `test_drafters.py`, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.copies import upload_to
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
from tests.speculation.eagle_files import PlainHead
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
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.eagle3().write(tmp_path_factory.mktemp("official"))


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_of_published_formats_equal_the_references(
    name: str, deep_target: Path, deep_model: PreTrainedModel, tmp_path: Path
) -> None:
    published = FORMATS[name](deep_target)
    watched = Watched(deep_target, published.write(tmp_path / "head"), num_tokens=3)
    prompt = prompt_of(37)  # two chunks
    watched.ask("a", prompt, 8)
    assert watched.run()["a"] == greedy(deep_model, prompt, 8)
    watched.assert_drafts(PlainHead(published, deep_model, files.THETA).draft)


class Steps:
    """Counts an engine's steps. Before each it calls `begin`; if that returns False, no request drafts."""

    def __init__(self, watched: Watched, begin: Callable[[int, ScheduledStep], bool]) -> None:
        self.count = 0
        self._begin, speculator = begin, watched.engine._speculator
        assert speculator is not None
        self._prepare, speculator.prepare = speculator.prepare, self.prepare

    def prepare(self, step: ScheduledStep, num_active: int, make_room: MakeRoom) -> bool:
        self.count += 1
        return self._prepare(step, num_active, make_room if self._begin(self.count, step) else no_room)


def no_room(step: ScheduledStep, sequence: SequenceState, wish: int) -> int:
    return 0


def drafts_if(monkeypatch: pytest.MonkeyPatch, drafts: Callable[[], bool]) -> None:
    """Let the controller's plans draft only if `drafts()` is true."""
    chosen = property(lambda self: drafts(), lambda self, value: None)
    monkeypatch.setattr(DraftController, "drafts", chosen, raising=False)


def test_drafts_continue_after_steps_that_were_not_read(
    deep_target: Path, deep_model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(deep_target, official)
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
    assert watched.run()["a"] == greedy(deep_model, prompt, 40)
    lengths = [len(token_ids) for _, token_ids, _ in watched.drafts]
    assert min(lengths) == 21
    assert max(lengths) > 40
    assert (seen[0], seen[-1]) == ((1, False), (resumed[0], True))
    assert [draft.is_blind for draft in watched.trees] == [length > resumed[0] for length in lengths]


def test_unread_steps_are_read_when_drafts_resume(
    deep_target: Path, deep_model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(deep_target, official)
    for name, length in (("a", 20), ("b", 31)):
        watched.ask(name, prompt_of(length, seed=length), 48)

    def drafts(number: int, step: object = None) -> bool:
        return not (6 <= number < 16 or 22 <= number < 28)

    steps = Steps(watched, drafts)
    drafts_if(monkeypatch, lambda: drafts(steps.count))
    outputs = watched.run()
    for name, length in (("a", 20), ("b", 31)):
        assert outputs[name] == greedy(deep_model, prompt_of(length, seed=length), 48)
    assert not any(draft.is_blind for draft in watched.trees)
    watched.assert_drafts(PlainHead(files.eagle3(), deep_model, files.THETA).draft)


def test_rows_made_useless_by_a_gap_are_not_written(
    deep_target: Path, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and a later step are read together, and none of their rows is left to write."""
    watched = Watched(deep_target, official)
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
    deep_target: Path, deep_model: PreTrainedModel, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(deep_target, official)
    speculator: Any = watched.engine._speculator
    wants_hidden = speculator._wants_hidden
    steps = Steps(watched, lambda number, step: number > 6)
    drafts_if(monkeypatch, lambda: steps.count >= 7)
    speculator._wants_hidden = lambda step: step.only_decodes and wants_hidden(step)
    prompt = prompt_of(30)
    watched.ask("a", prompt, 40)
    assert watched.run()["a"] == greedy(deep_model, prompt, 40)
    assert watched.trees and all(draft.is_blind for draft in watched.trees)
    assert watched.drafter.num_drafted("a") == 0


@pytest.mark.parametrize("reads", [True, False])
def test_a_prompt_is_read_for_a_fixed_number_of_tokens(
    reads: bool, deep_target: Path, official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under any load, since fixed drafts need not pay."""
    monkeypatch.setattr(DraftController, "reads_prompts", lambda *arguments: reads)
    watched = Watched(deep_target, official)
    watched.ask("a", prompt_of(30), 10)
    watched.run()
    assert watched.trees and not any(draft.is_blind for draft in watched.trees)


@pytest.mark.parametrize(("temperature", "decision"), [(0.0, 0.01), (0.9, 0.05)])
def test_trees_grow_along_the_likeliest_paths(
    temperature: float, decision: float, deep_target: Path, deep_model: PreTrainedModel, tmp_path: Path
) -> None:
    """The head is undecided, so trees are wide."""
    published = files.eagle3()
    published.tensors["lm_head.weight"] *= decision
    watched = Watched(deep_target, published.write(tmp_path), num_tokens=4, tree_nodes=14)
    prompts = {"a": prompt_of(12), "b": prompt_of(29, 4)}
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 3}
    for request_id, prompt in prompts.items():
        watched.ask(request_id, prompt, 20, sampling=sampling)
    outputs = watched.run()
    if temperature == 0:
        assert all(outputs[name] == greedy(deep_model, prompt, 20) for name, prompt in prompts.items())
    params = SamplingParams(max_tokens=20, **sampling)
    plain = PlainHead(published, deep_model, files.THETA)
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
