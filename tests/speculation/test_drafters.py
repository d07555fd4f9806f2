"""Heads in the engine: drafts equal a plain reference's, whatever is accepted, shared or moved.

A method's own layouts and options have modules of their own. A new method needs a line in `HEADS`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow
from protocol.sampling import SamplingParams
from protocol.speculation import Method, Verification
from tests.speculation import dflash_files, eagle_files, medusa_files, mtp_files
from tests.speculation.eagle_engine import Watched
from tests.speculation.eagle_files import VOCAB, PlainHead
from tests.speculation.small_engine import prompt_of as any_prompt
from tests.worker.tiny_model import greedy

prompt_of = partial(any_prompt, vocab_size=VOCAB)

Logits = Callable[[list[int], list[int], int, int | None], Tensor]
"""Returns the logits [drafted, vocab_size] from which tokens are drafted one after the other after committed
tokens, with no context before a place, and without the hidden state before another place.
"""


def of_eagle(folder: Path, model: PreTrainedModel) -> Logits:
    published = eagle_files.eagle3()
    published.write(folder)
    plain = PlainHead(published, model, eagle_files.THETA)
    return lambda tokens, drafted, first, lost: torch.stack(
        [plain.logits(tokens, drafted[:n], max(first - 1, 0), lost) for n in range(len(drafted))]
    )


def of_dflash(folder: Path, model: PreTrainedModel) -> Logits:
    published = dflash_files.dflash("sf")
    published.write(folder)
    plain = dflash_files.PlainBlock(published, model)
    return lambda tokens, drafted, first, _: plain.logits(tokens, len(drafted), first)


def of_medusa(folder: Path, model: PreTrainedModel) -> Logits:
    heads = medusa_files.random_heads(4, 1, eagle_files.WIDTH, VOCAB)
    medusa_files.write_v1(folder, medusa_files.own_names(heads))

    @torch.no_grad()
    def logits(tokens: list[int], drafted: list[int], *_: object) -> Tensor:
        output = model(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True)
        return heads.logits(output.hidden_states[-1][:, -1])[0, : len(drafted)]

    return logits


def of_mtp(folder: Path, model: PreTrainedModel) -> Logits:
    plain = mtp_files.publish_beside(model, folder)
    return lambda tokens, drafted, _, lost: torch.stack(
        [plain.logits(tokens, drafted[:n], lost) for n in range(len(drafted))]
    )


HEADS: dict[Method, Callable[[Path, PreTrainedModel], Logits]] = {
    "eagle": of_eagle,
    "dflash": of_dflash,
    "medusa": of_medusa,
    "mtp": of_mtp,
}


@dataclass
class Case:
    """A method's head for a model."""

    method: Method
    target: Path
    head: Path
    model: PreTrainedModel
    logits: Logits

    def watched(self, **options: Any) -> Watched:
        return Watched(self.target, self.head, method=self.method, **options)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return greedy(self.model, prompt, count)

    def assert_as_plain(self, watched: Watched, first: int = 0, lost: int | None = None) -> None:
        assert watched.drafts
        for request_id, token_ids, drafted in watched.drafts:
            expected = self.logits(token_ids, drafted, first, lost).argmax(-1).tolist()
            assert drafted == expected, f"{request_id} after {len(token_ids)} tokens"


@pytest.fixture(scope="module", params=HEADS)
def case(
    request: pytest.FixtureRequest,
    deep_target: Path,
    deep_model: PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    logits = HEADS[request.param](folder, deep_model)
    return Case(request.param, deep_target, folder, deep_model, logits)


with_kv = pytest.mark.parametrize("case", ["eagle", "dflash"], indirect=True)


@pytest.mark.parametrize("accepted", [0, 4, "mixed"])
def test_drafts_follow_what_is_accepted(case: Case, accepted: int | str) -> None:
    """Rows of committed tokens have the target's hidden states (number 19 of other servers' faults)."""
    watched = case.watched()
    prompts = {"a": prompt_of(9, 1), "b": prompt_of(30, 2), "c": prompt_of(50, 3)}
    for request_id, prompt in prompts.items():
        watched.answers[request_id] = prompt + case.greedy(prompt, 28)
        watched.ask(request_id, prompt, 20)
    rng = random.Random(5)
    watched.correct = lambda _: rng.randrange(5) if accepted == "mixed" else int(accepted)
    outputs = watched.run()
    for request_id, prompt in prompts.items():
        assert outputs[request_id] == watched.answers[request_id][len(prompt) :][:20]
    assert len({len(drafted) for _, _, drafted in watched.drafts}) > 1, "fewer tokens near the end"
    case.assert_as_plain(watched)
    assert not vars(watched.drafter).get("_known") and not vars(watched.drafter).get("_features")


def test_cached_prompts(case: Case) -> None:
    """A whole prompt lacks nothing; the beginning of a longer one lacks the last hidden state alone."""
    watched = case.watched()
    for turn in ("first", "second"):
        watched.ask(turn, prompt_of(40), 12)
        watched.run()
    case.assert_as_plain(watched)
    watched.drafts.clear()
    watched.ask("longer", prompt_of(40)[:32] + prompt_of(6, 8), 6)
    watched.run()
    assert watched.engine.stats().prefix_hit_tokens >= 32 + 32
    case.assert_as_plain(watched, lost=32)


@with_kv
def test_blocks_without_draft_kv_are_not_read(case: Case) -> None:
    watched = case.watched()
    watched.ask("a", prompt_of(40), 6)
    watched.run()
    watched.drafts.clear()
    watched.engine.blocks.drafted[:] = [False] * watched.engine.blocks.num_blocks
    watched.engine.pool.segment("draft").fill_(1e3)
    watched.ask("b", prompt_of(40)[:32] + prompt_of(6, 8), 6)
    watched.run()
    assert all(draft.is_blind for draft in watched.trees[-len(watched.drafts) :])
    case.assert_as_plain(watched, first=32, lost=32)


@with_kv
def test_steps_without_drafts_are_caught_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculation.target_states.MOST_UNREAD", 8)
    watched = case.watched()
    watched.ask("a", prompt_of(20), 32)
    speculator: Any = watched.engine._speculator
    prepare, numbers = speculator.prepare, itertools.count(1)

    def late(step: Any, num_active: int, make_room: Any) -> Any:
        known, number = watched.drafter._known.get("a"), next(numbers)
        assert number >= 22 or known is None or known.end - known.written <= 9, "more is kept than may be"
        return prepare(step, num_active, make_room if number >= 22 else lambda *_: 0)

    speculator.prepare = late
    assert watched.run()["a"] == case.greedy(prompt_of(20), 32)
    assert len(watched.drafts[0][1]) > 38
    case.assert_as_plain(watched)


@pytest.mark.parametrize("uncomputed", [0, 5])
def test_a_handed_over_request_drafts_at_once(case: Case, uncomputed: int) -> None:
    """The decode worker's first draft is the same as if it had computed the prompt."""
    prefill, decode = case.watched(), case.watched()
    prompt = prompt_of(45)
    first, state = prefill.hand_over(decode, prompt, 6, uncomputed)
    assert (state.kind, state.num_tokens) == ("carried", 0 if case.method == "medusa" else len(prompt))
    assert first + decode.run()["a"] == case.greedy(prompt, 6)
    assert len(decode.drafts[0][1]) == len(prompt) + (2 if uncomputed else 1)
    case.assert_as_plain(decode)


@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_sampled_drafts_have_the_noise_of_their_position(case: Case, verification: Verification) -> None:
    """Rejection sampling gets the distributions that they were drawn from instead."""
    watched = case.watched(num_tokens=3, verification=verification)
    prompt = prompt_of(12)
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 11}
    if verification == "coupled":
        sampling["top_p"] = 0.9
    watched.ask("a", prompt, 8, sampling=sampling)
    watched.run()
    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
    sampler = Sampler(VOCAB, "cpu", [])
    assert watched.drafts
    for (_, token_ids, drafted), draft in zip(watched.drafts, watched.trees, strict=True):
        logits = case.logits(token_ids, drafted, 0, None)
        if verification == "standard":
            torch.testing.assert_close(draft.distributions, (logits / 0.8).softmax(-1), atol=1e-4, rtol=1e-3)
            continue
        for place, token in enumerate(drafted):
            row = SamplingRow(params, prompt, [], len(token_ids) + place, "a")
            assert sampler.sample(logits[place][None], [row]).token_ids == [token]
