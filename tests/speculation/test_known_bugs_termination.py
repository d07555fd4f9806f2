"""Faults of other servers when a sequence ends within accepted tokens. Numbers follow our reference list.

Number 10, stop strings within accepted tokens, concerns the router: tests/router/text/test_choice.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.engine import Engine
from protocol.outputs import TokenOutput
from tests.speculation import scripted
from tests.speculation.scripted import Script, ScriptedDrafter
from tests.speculation.small_engine import VOCAB_SIZE, ask, native_config, prompt_of, run, tokens

PROMPT = prompt_of(20)
LONG = 40
NUM_DRAFTED = 8


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
    folder: Path, script: Script, num_tokens: int = NUM_DRAFTED, **sampling: object
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
    last = answer[max_tokens - 1]
    sampling = {"max_tokens": max_tokens, "stop_token_ids": [last] if stops else [], "ignore_eos": True}
    plain, speculated, _ = both(pair[0], scripted.right({"r": answer}), **sampling)
    assert plain.finish_reason == ("stop" if stops else "length")
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
    engine = scripted.engine_with(native_config(pair[0]), drafter, NUM_DRAFTED)
    run(engine, [ask("r", PROMPT, 7, ignore_eos=True)])
    assert drafter.forgotten == ["r"]
