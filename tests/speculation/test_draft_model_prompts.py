"""A draft model reads prompts only when a draft is wanted, and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.engine import Engine
from protocol.errors import ConfigError
from speculation import draft_model
from tests.speculation.small_engine import CHUNK, ask, drafting, prompt_of, run, small_config, tokens
from tests.worker.tiny_model import greedy, load

PROMPT = 60
NUM_EMITTED = 5


def engine_with(pair: tuple[Path, Path]) -> Engine:
    options = {"method": "draft_model", "model": str(pair[1]), "num_speculative_tokens": 3}
    return drafting(small_config(pair[0]), **options)


def test_a_prompt_is_read_with_the_first_draft(pair: tuple[Path, Path]) -> None:
    engine = engine_with(pair)
    engine.add(ask("a", prompt_of(PROMPT), 8, ignore_eos=True, temperature=0.0))
    assert engine.step().outputs[0].token_ids
    assert engine.draft_state("a").num_tokens == 0
    assert engine.step().outputs[0].drafted_tokens == 3
    assert engine.draft_state("a").num_tokens > PROMPT


def test_a_long_prompt_is_read_over_several_steps(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of two requests drafts before its prompt is read, and no token waits or changes."""
    requests = [
        ask(name, prompt_of(PROMPT, i), 24, ignore_eos=True, temperature=0.0) for i, name in enumerate("ab")
    ]
    plain = tokens(run(Engine(small_config(pair[0], 128)), requests))
    monkeypatch.setattr(draft_model, "_READ_AT_ONCE", 16)
    engine = engine_with(pair)
    for request in requests:
        engine.add(request)
    found: dict[str, list[int]] = {"a": [], "b": []}
    drafted: list[int] = []
    while engine.has_work():
        outputs = engine.step().outputs
        drafted.append(sum(output.drafted_tokens for output in outputs))
        for output in outputs:
            assert output.token_ids
            found[output.request_id] += output.token_ids
    assert found == plain
    assert drafted[:4] == [0] * 4, "a prompt, and three steps of 16 tokens"
    assert any(drafted)


def test_a_draft_that_cannot_be_loaded_is_blamed_on_its_option(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--speculative-config: model: cannot load"):
        engine_with((pair[0], tmp_path))


def test_the_last_chunk_of_a_request_placed_again_drafts_nothing(target: Path) -> None:
    """One token of its prompt and emitted tokens is left for the second step, which resembles decoding."""
    prompt = list(range(1, CHUNK + 2 - NUM_EMITTED))
    expected = greedy(load(target), prompt, 24)
    engine = engine_with((target, target))
    request = ask("a", prompt, ignore_eos=True)
    request.output_token_ids.extend(expected[:NUM_EMITTED])
    engine.add(request, prefill_only=True)
    assert not engine.step().outputs
    [first] = engine.step().outputs
    assert (first.token_ids, first.drafted_tokens) == (expected[NUM_EMITTED : NUM_EMITTED + 1], 0)
    assert not engine.step().outputs

    engine.resume("a")
    rest = run(engine)["a"]
    assert first.token_ids + rest.token_ids == expected[NUM_EMITTED:]
    assert rest.drafted_tokens > 0
