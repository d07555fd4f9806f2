"""A sequence that drafts for a remote target is held and rewound, and still drafts its model's tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.step.sequence import SequenceStage
from speculation.remote import MultiStepSpeculator
from tests.speculation.small_engine import ask, prompt_of, run, small_config

PROMPT = prompt_of(30)
SAMPLING: dict[str, Any] = {"temperature": 0.7, "seed": 3, "ignore_eos": True}


def continuation(plain: Engine, output: list[int], count: int) -> list[int]:
    """Return the model's continuation of the prompt and this much output."""
    request = ask("plain", PROMPT, len(output) + count, **SAMPLING)
    request.output_token_ids.extend(output)
    return run(plain, [request])["plain"].token_ids


def draft(engine: Engine) -> list[int]:
    """Return what it drafts until it is held."""
    engine.resume("a")
    while engine.has_work():
        engine.step()
    return engine.sequences["a"].drafted


@pytest.mark.parametrize(
    ("forward", "options"),
    [
        ("native decoder", {"compile": "auto", "dtype": "bfloat16"}),
        ("native decoder", {"compile": "auto"}),
        ("eager", {}),
    ],
    ids=["native", "native-float32", "eager"],
)
def test_drafts_after_given_tokens_equal_fresh_ones(
    target: Path, forward: str, options: dict[str, Any]
) -> None:
    """The native decoder computes several tokens per step, the other path one."""
    plain = Engine(small_config(target, enable_prefix_caching=False, **options))
    engine = Engine(small_config(target, **options), speculate=MultiStepSpeculator)
    assert engine.start_up["forward"].startswith(forward)
    rng, given = random.Random(5), list[int]()
    engine.add(ask("a", PROMPT, 200, **SAMPLING), hold_at=len(PROMPT) + 9)
    for _ in range(24):
        drafted = draft(engine)
        assert drafted == continuation(plain, given, len(drafted))
        kept = rng.randrange(len(drafted) + 1)
        new = drafted[:kept] + [rng.randrange(1, 300) for _ in range(rng.choice((0, 1, 1, 3)))]
        given += new
        count = rng.randrange(1, 13)
        agreed = engine.give("a", new, len(PROMPT) + len(given) + count)
        assert kept <= agreed <= len(new)
    assert len(given) > 40
    engine.abort("a")
    assert engine.blocks.available == engine.blocks.num_blocks


def test_only_given_tokens_are_published(target: Path) -> None:
    engine = Engine(small_config(target), speculate=MultiStepSpeculator)
    engine.add(ask("a", PROMPT, 100, **SAMPLING), hold_at=len(PROMPT) + 40)
    drafted = draft(engine)
    assert len(drafted) == 40
    assert len(engine.blocks.tables[0].entries) == len(PROMPT) // 16
    engine.give("a", drafted[:20], len(PROMPT) + 41)
    draft(engine)
    assert len(engine.blocks.tables[0].entries) == (len(PROMPT) + 20) // 16


def test_it_is_held_at_its_limit_and_never_ends_by_itself(target: Path) -> None:
    engine = Engine(small_config(target), speculate=MultiStepSpeculator)
    engine.add(ask("a", PROMPT, 100, logit_bias={0: 100.0}), hold_at=len(PROMPT) + 5)
    assert draft(engine) == [0] * 5  # the end of text
    sequence = engine.sequences["a"]
    assert sequence.stage is SequenceStage.HELD
    engine.give("a", [0], len(PROMPT) + 4)  # its target can use fewer tokens than there are
    assert draft(engine) == [0] * 4
    engine.give("a", [0, 0], len(PROMPT) + 12)
    engine.resume("a")
    engine.scheduler.hold(engine.sequences["a"])
    assert not engine.has_work()
    assert engine.sequences["a"].drafted == [0] * 2
