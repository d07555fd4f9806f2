"""Methods without weights in a real engine: they change no token and save steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from costs.drafting import FIRST_RATE
from engine.engine import Engine
from protocol.requests import EngineRequest
from protocol.speculation import WEIGHTLESS, Method, RequestSpeculation
from speculation.speculator import BatchSpeculator
from speculation.weightless.ngram import TextDrafter
from tests.speculation.engines import ticks
from tests.speculation.small_engine import ask, drafting, native_config, prompt_of, run, tokens

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seeded": {"temperature": 0.8, "seed": 11, "ignore_eos": True},
    "of few tokens": {"allowed_token_ids": [5, 6, 7], "ignore_eos": True},
}
"""The tiny model hardly repeats itself without such limits."""


def requests(sampling: dict[str, Any], max_tokens: int = 40) -> list[EngineRequest]:
    """Return a repetitive prompt, a varied one, one longer than a step, and one seen before."""
    repeated = prompt_of(12, seed=1)
    prompts = [repeated * 3, prompt_of(20, seed=2), prompt_of(90, seed=3), [*repeated * 3, 5]]
    return [ask(str(index), prompt, max_tokens, **sampling) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, dict[str, list[int]]]:
    """Return each request's tokens without speculation, by kind of sampling."""
    engine = Engine(native_config(target))
    return {kind: tokens(run(engine, requests(sampling))) for kind, sampling in SAMPLING.items()}


def engine_with(target: Path, method: Method, count: int) -> Engine:
    return drafting(native_config(target), method=method, num_speculative_tokens=count)


def test_beyond_the_ends_of_a_tree_acceptance_is_zero(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lookahead's paths are three tokens long, so a fourth token is never accepted."""
    ticks(monkeypatch)
    engine = engine_with(target, "lookahead", 8)
    run(engine, requests(SAMPLING["of few tokens"], max_tokens=160))
    state = engine.speculation()
    assert state is not None
    assert state.methods[0].acceptance[3] < FIRST_RATE / 2


def test_a_tree_fits_beside_a_single_sequence(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks(monkeypatch)
    engine = drafting(native_config(target, max_num_seqs=1), method="lookahead")
    run(engine, [ask("a", prompt_of(16), 120, **SAMPLING["of few tokens"])])
    counters = engine.counters()
    assert (
        counters['spec_decode_steps_total{drafts="yes"}'] > counters['spec_decode_steps_total{drafts="no"}']
    )


def drafter_of(engine: Engine, method: Method) -> TextDrafter:
    assert isinstance(engine._speculator, BatchSpeculator)
    drafter = engine._speculator._drafters[method]
    assert isinstance(drafter, TextDrafter)
    return drafter


@pytest.mark.parametrize("method", WEIGHTLESS)
def test_repetitive_text_takes_fewer_steps(target: Path, method: Method) -> None:
    engine = engine_with(target, method, 5)
    run(engine, [ask("a", prompt_of(16), 120, **SAMPLING["of few tokens"])])
    assert engine.stats().steps < 0.8 * 120


def test_an_earlier_answer_speeds_up_the_same_request(target: Path) -> None:
    engine = engine_with(target, "suffix", 8)
    sampling = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    first = run(engine, [ask("first", prompt_of(20), 60, **sampling)])["first"]
    again = run(engine, [ask("again", prompt_of(20), 60, **sampling)])["again"]
    assert again.token_ids == first.token_ids
    assert again.accepted_tokens > 40 > first.accepted_tokens
    elsewhere = msgspec.structs.replace(ask("else", prompt_of(20), 60, **sampling), cache_salt="another")
    other = run(engine, [elsewhere])["else"]
    assert other.token_ids == first.token_ids
    assert (other.drafted_tokens, other.accepted_tokens) == (first.drafted_tokens, first.accepted_tokens)


def test_a_batch_may_mix_methods(target: Path, plain: dict[str, dict[str, list[int]]]) -> None:
    engine = Engine(native_config(target), speculate=BatchSpeculator)
    asked = [RequestSpeculation(method=method, num_speculative_tokens=4) for method in WEIGHTLESS]
    mixed = [
        msgspec.structs.replace(request, speculation=speculation)
        for request, speculation in zip(
            requests(SAMPLING["of few tokens"]), [*asked, RequestSpeculation(enabled=False)], strict=True
        )
    ]
    outputs = run(engine, mixed)
    assert tokens(outputs) == plain["of few tokens"]
    assert outputs["3"].drafted_tokens == 0
    assert all(outputs[name].drafted_tokens > 0 for name in ("0", "1", "2"))


def test_an_aborted_request_leaves_nothing(target: Path) -> None:
    for method in WEIGHTLESS:
        engine = engine_with(target, method, 5)
        for request in requests(SAMPLING["greedy"]):
            engine.add(request)
        for _ in range(8):
            engine.step()
        assert drafter_of(engine, method)._texts
        for name in ("0", "1", "2", "3"):
            engine.abort(name)
        assert not drafter_of(engine, method)._texts
