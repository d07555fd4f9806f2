"""Faults of other servers: distributions, ends, constraints and log-probabilities of drafted tokens.

Numbers follow our reference list. Numbers 5 and 19: `test_verification.py`, `test_drafters.py`. Number 10,
stop strings within accepted tokens: tests/router/text/test_detokenizer.py. Numbers 13 and 14 concern
grammars, which other tests cover. Numbers 17 to 22, the KV of drafted tokens: `test_known_bugs_kv.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Verification
from tests.engine.sampler_reference import distribution
from tests.speculation import scripted
from tests.speculation.scripted import Script, ScriptedDrafter
from tests.speculation.small_engine import (
    VOCAB_SIZE,
    ask,
    drafted_and_accepted,
    drafting,
    native_config,
    prompt_of,
    run,
    tokens,
)
from tests.statistics.toy_speculation import LogitsRunner

BY_CHANCE: list[Verification] = ["standard", "block"]

PROCESSING: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "penalized": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_k": 7},
}


def sequence_of(seed: int, output: list[int], **sampling: Any) -> SequenceState:
    params = SamplingParams(max_tokens=100, seed=seed, **sampling)
    request = EngineRequest(
        request_id=f"r{seed}", prompt_token_ids=[3, 1, 4], sampling=params, output_token_ids=output
    )
    return SequenceState(request, seed)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in PROCESSING), ("penalized", torch.bfloat16)]
)
def test_bugs_01_and_03_drafts_come_with_the_distribution_they_were_drawn_from(
    name: str, dtype: torch.dtype
) -> None:
    """The distribution includes all processing, and comes from the same logits as the ratio, in any dtype."""
    size, count = 20, 1_500
    sequences = [sequence_of(seed, [2, 2, 7], **PROCESSING[name]) for seed in range(count)]
    logits = 2 * torch.randn(2, 1, size, generator=torch.Generator().manual_seed(5)).to(dtype)
    steps = iter(logits)
    runner = LogitsRunner(size, lambda last: next(steps).expand(len(last), -1))
    drawn = runner.draft(sequences, 2, "standard")
    for depth in range(2):
        for sequence, draft in zip(sequences[:20], drawn, strict=False):
            assert draft.distributions is not None and draft.distributions.dtype is torch.float32
            row = sequence.sampling_row(draft.token_ids[:depth])
            exact = distribution(logits[depth, 0], row)
            torch.testing.assert_close(draft.distributions[depth].double(), exact, atol=1e-6, rtol=1e-5)
        counts = torch.bincount(torch.tensor([draft.token_ids[0] for draft in drawn]), minlength=size)
        assert drawn[0].distributions is not None
        frequencies = counts / count
        assert (frequencies - drawn[0].distributions[0]).abs().max() < 0.06
        assert counts[drawn[0].distributions[0] == 0].sum() == 0


def test_bug_04_greedy_drafts_have_no_distribution() -> None:
    runner = LogitsRunner(20, lambda last: torch.randn(len(last), 20))
    drafts = runner.draft([sequence_of(0, []), sequence_of(1, [], temperature=0.0)], 1, "standard")
    assert [draft.distributions is not None for draft in drafts] == [True, False]


def unrelated_drafts(sequence: SequenceState, count: int) -> Draft:
    """Draft tokens that depend on the sequence's own tokens alone."""
    return Draft([(7 * token + 1) % VOCAB_SIZE for token in sequence.token_ids[-count:]])


def crowd() -> list[EngineRequest]:
    """Return greedy and sampled requests with several parameters, some with a common seed."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_k": 20},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.7, "seed": 2**40, "top_p": 0.9},
        {"temperature": 1.2, "seed": -5, "min_p": 0.01, "logprobs": 1},
    ]
    return [
        ask(f"r{index}", prompt_of(15 + index, index), ignore_eos=True, **sampling)
        for index, sampling in enumerate(samplings)
    ]


@pytest.mark.parametrize("verification", ["coupled", *BY_CHANCE])
def test_bugs_06_and_07_a_request_is_the_same_alone_and_in_any_batch(
    pair: tuple[Path, Path], verification: Verification
) -> None:
    def engine() -> Engine:
        drafter = ScriptedDrafter(unrelated_drafts)
        return scripted.engine_with(native_config(pair[0]), drafter, num_tokens=3, verification=verification)

    together = tokens(run(engine(), crowd()))
    backwards = tokens(run(engine(), crowd()[::-1]))
    alone: dict[str, list[int]] = {}
    one_by_one = engine()
    for request in crowd():
        alone |= tokens(run(one_by_one, [request]))
    assert together == backwards == alone


@pytest.mark.parametrize("verification", ["coupled", *BY_CHANCE])
def test_bug_06_requests_that_differ_only_in_their_seeds_differ(
    pair: tuple[Path, Path], verification: Verification
) -> None:
    prompt = prompt_of(20)
    asked = [
        ask(f"r{index}", prompt, ignore_eos=True, temperature=1.5, seed=seed)
        for index, seed in enumerate([1, 2, 3, 1, 1 + 2**32])
    ]
    drafter = ScriptedDrafter(unrelated_drafts)
    engine = scripted.engine_with(native_config(pair[0]), drafter, num_tokens=3, verification=verification)
    found = tokens(run(engine, asked))
    assert found["r0"] == found["r3"]
    assert len({tuple(each) for each in found.values()}) == 4


PROMPT = prompt_of(20)
LONG = 40


@pytest.fixture(scope="module")
def answer(pair: tuple[Path, Path]) -> list[int]:
    """Return the continuation of the prompt without any end."""
    engine = Engine(native_config(pair[0]))
    return tokens(run(engine, [ask("r", PROMPT, LONG, ignore_eos=True)]))["r"]


def fresh_at(answer: list[int], earliest: int) -> int:
    """Return the first place from `earliest` on with a token that has not occurred before."""
    return next(i for i in range(earliest, len(answer)) if answer[i] not in answer[:i])


def model_that_ends_with(folder: Path, token: int, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    for name in ("config.json", "generation_config.json"):
        path = copy / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": token}))
    return copy


def both(
    folder: Path, script: Script, num_tokens: int = 8, **sampling: Any
) -> tuple[TokenOutput, TokenOutput, Engine]:
    """Run one request without and with speculation."""
    request = ask("r", PROMPT, **({"max_tokens": LONG} | sampling))
    plain = run(Engine(native_config(folder)), [request])["r"]
    engine = scripted.engine_with(native_config(folder), ScriptedDrafter(script), num_tokens)
    return plain, run(engine, [request])["r"], engine


def assert_same_end(plain: TokenOutput, speculated: TokenOutput) -> None:
    assert speculated.token_ids == plain.token_ids
    assert speculated.finish_reason == plain.finish_reason
    assert speculated.stop_token_id == plain.stop_token_id


@pytest.mark.parametrize(("earliest", "min_tokens"), [(2, 0), (5, 0), (9, 0), (10, 0), (3, 8)])
def test_bug_08_an_accepted_end_of_text_ends_the_request(
    pair: tuple[Path, Path], answer: list[int], tmp_path: Path, earliest: int, min_tokens: int
) -> None:
    """If it has `min_tokens`."""
    end = fresh_at(answer, earliest)
    folder = model_that_ends_with(pair[0], answer[end], tmp_path / "model")
    least = end + min_tokens if min_tokens else 0
    plain, speculated, _ = both(folder, scripted.right({"r": answer}), logprobs=2, min_tokens=least)
    assert (plain.token_ids == answer[: end + 1]) == (plain.finish_reason == "stop") == (not min_tokens)
    assert_same_end(plain, speculated)
    assert speculated.logprobs is not None and len(speculated.logprobs) == len(plain.token_ids) >= least


@pytest.mark.parametrize(
    ("max_tokens", "stops"), [*((number, False) for number in (1, 2, 8, 9, 10, 18)), (12, True)]
)
def test_bug_09_max_tokens_cuts_accepted_tokens(
    pair: tuple[Path, Path], answer: list[int], max_tokens: int, stops: bool
) -> None:
    """A stop token among the tokens left comes first."""
    last = answer[fresh_at(answer, 6)]
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stop_token_ids": [last] if stops else [],
        "ignore_eos": True,
    }
    plain, speculated, _ = both(pair[0], scripted.right({"r": answer}), **sampling)
    assert (plain.finish_reason, plain.stop_token_id) == (("stop", last) if stops else ("length", None))
    assert stops or plain.token_ids == answer[:max_tokens]
    assert_same_end(plain, speculated)


def test_bug_11_a_rejected_end_ends_nothing(
    pair: tuple[Path, Path], answer: list[int], tmp_path: Path
) -> None:
    end = next(token for token in range(VOCAB_SIZE) if token not in answer)
    folder = model_that_ends_with(pair[0], end, tmp_path / "model")

    def ends_soon(sequence, count):
        draft = scripted.right({"r": answer})(sequence, count)
        if draft is not None:
            draft.token_ids[len(draft.token_ids) // 2] = end
        return draft

    plain, speculated, _ = both(folder, ends_soon)
    assert plain.finish_reason == "length"
    assert_same_end(plain, speculated)


def test_bug_12_only_output_tokens_count_as_accepted(pair: tuple[Path, Path], answer: list[int]) -> None:
    end = fresh_at(answer, 4)
    plain, speculated, engine = both(
        pair[0], scripted.right({"r": answer}), stop_token_ids=[answer[end]], ignore_eos=True
    )
    assert_same_end(plain, speculated)
    counters = engine.counters()
    accepted = counters['spec_decode_num_accepted_tokens_total{method="ngram"}']
    drafts = counters['spec_decode_num_drafts_total{method="ngram"}']
    assert speculated.accepted_tokens == accepted
    # One token comes from the prompt, and one from each round unless a drafted token ended it.
    assert len(speculated.token_ids) - 1 - drafts <= accepted <= len(speculated.token_ids) - 1
    by_position = [value for name, value in counters.items() if "per_pos" in name]
    assert sum(by_position) == accepted


def test_an_ended_request_leaves_nothing(pair: tuple[Path, Path], answer: list[int]) -> None:
    drafter = ScriptedDrafter(scripted.right({"r": answer}))
    engine = scripted.engine_with(native_config(pair[0]), drafter, 8)
    run(engine, [ask("r", PROMPT, 7, ignore_eos=True)])
    assert drafter.forgotten == ["r"]


NUM_DRAFTED = 5

CONSTRAINTS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.1},
    "rewarded repetition": {"frequency_penalty": -1.0},
    "allowed": {"allowed_token_ids": [5, 9, 20, 77, 130, 131, 200]},
    "banned": {"banned_token_sequences": [[9], [130, 131], [20, 77, 5], [131, 131]]},
    "few allowed, banned and penalized": {
        "allowed_token_ids": [5, 9, 20],
        "banned_token_sequences": [[5, 5], [9, 20, 9]],
        "frequency_penalty": 0.8,
    },
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [5, 9], "allowed_token_ids": [5, 9, 20, 77]},
    "bias": {"logit_bias": {5: 6.0, 9: 5.0, 20: -4.0}, "presence_penalty": 2.0},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
}


def requests(**sampling: Any) -> list[EngineRequest]:
    """Return requests with all constraints, so that rows with and without each lie side by side."""
    return [
        ask(name, prompt_of(12 + 3 * index, index), ignore_eos=True, **(sampling | constraint))
        for index, (name, constraint) in enumerate(CONSTRAINTS.items())
    ]


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, dict[str, TokenOutput]]:
    engine = Engine(native_config(pair[0]))
    return {name: run(engine, requests(**sampling)) for name, sampling in SAMPLING.items()}


def repeats(sequence: SequenceState, count: int) -> Draft:
    return Draft([sequence.token_ids[-1]] * count)


WITHOUT_CHOICE = {"temperature": 1.0, "top_k": 1}
"""Makes requests take the path of sampling, with the tokens of greedy ones."""
RULES: list[tuple[Verification, str, dict[str, Any]]] = [
    *(("coupled", name, sampling) for name, sampling in SAMPLING.items()),
    *((rule, "greedy", WITHOUT_CHOICE) for rule in ("standard", "block")),
]


@pytest.mark.parametrize(("verification", "expected", "sampling"), RULES)
def test_bug_15_each_position_is_constrained_by_the_tokens_before_it(
    pair: tuple[Path, Path],
    plain: dict[str, dict[str, TokenOutput]],
    verification: Verification,
    expected: str,
    sampling: dict[str, Any],
) -> None:
    """Also behind drafts that repeat one token."""
    often_right = scripted.sometimes_right(tokens(plain[expected]), 0.7, VOCAB_SIZE)
    for script in (often_right, repeats):
        drafter = ScriptedDrafter(script)
        engine = scripted.engine_with(native_config(pair[0]), drafter, NUM_DRAFTED, verification=verification)
        found = run(engine, requests(**sampling))
        assert tokens(found) == tokens(plain[expected])
        assert drafted_and_accepted(found)[1] > 20 or script is repeats


@pytest.mark.parametrize("verification", ["coupled", "standard", "block"])
def test_bug_15_a_draft_model_keeps_no_penalties_of_rejected_tokens(
    pair: tuple[Path, Path], plain: dict[str, dict[str, TokenOutput]], verification: Verification
) -> None:
    target, draft = pair
    options = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTED}
    engine = drafting(native_config(target, 256), verification=verification, **options)
    assert tokens(run(engine, requests(temperature=0.0))) == tokens(plain["greedy"])


@pytest.mark.parametrize(("verification", "_", "sampling"), RULES)
def test_bug_16_log_probabilities_equal_those_without_speculation(
    pair: tuple[Path, Path], verification: Verification, _: str, sampling: dict[str, Any]
) -> None:
    asked = [
        ask(f"r{top}", prompt_of(20, index), ignore_eos=True, logprobs=top, **sampling)
        for index, top in enumerate((0, 1, 5, None))
    ]
    expected = run(Engine(native_config(pair[0])), asked)
    script = scripted.sometimes_right(tokens(expected), 0.6, VOCAB_SIZE)
    engine = scripted.engine_with(
        native_config(pair[0]), ScriptedDrafter(script), NUM_DRAFTED, verification=verification
    )
    assert_same_logprobs(run(engine, asked), expected)


def assert_same_logprobs(found: dict[str, TokenOutput], expected: dict[str, TokenOutput]) -> None:
    assert tokens(found) == tokens(expected)
    for request_id, output in expected.items():
        got = found[request_id].logprobs
        if output.logprobs is None:
            assert got is None
            continue
        assert got is not None and len(got) == len(output.logprobs) == len(output.token_ids)
        for entry, other in zip(got, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert entry.rank == other.rank and entry.top_token_ids == other.top_token_ids
            assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
