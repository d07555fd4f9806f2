"""A drafter that proposes what a test tells it, right or wrong, and an engine that uses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.drafter import ComputedRows, Drafter
from speculation.speculator import BatchSpeculator

Script = Callable[[SequenceState, int], Draft | None]
"""Returns a draft for a sequence that has room for this number of tokens."""

Answers = Mapping[str, Sequence[int]]
"""Maps requests to the tokens that they get without speculation."""


class ScriptedDrafter(Drafter):
    """Records its calls. It drafts only while it is `listening`, not as the engine measures itself."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.listening = False
        self.observed: list[ComputedRows] = []
        self.forgotten: list[str] = []

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        if not self.listening:
            return [None] * len(sequences)
        return [self.script(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        if self.listening:
            self.observed += computed

    def forget(self, request_id: str) -> None:
        if self.listening:
            self.forgotten.append(request_id)


def engine_with(config: ServeConfig, drafter: ScriptedDrafter, num_tokens: int, **options: Any) -> Engine:
    """Make an engine whose requests all use this drafter. `options` belong to the `SpeculativeConfig`."""
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=num_tokens, **options)

    def speculate(config: ServeConfig, loaded: LoadedModel) -> BatchSpeculator:
        with mock.patch("speculation.sources.build_drafter", return_value=drafter):
            return BatchSpeculator(config, loaded)

    engine = Engine(replace(config, speculative_config=asked), speculate=speculate)
    drafter.listening = True
    return engine


def right(answers: Answers) -> Script:
    """Draft only right tokens."""

    def script(sequence: SequenceState, count: int) -> Draft | None:
        return _chain(_next(answers, sequence, count))

    return script


def wrong_from(answers: Answers, depth: int, vocab_size: int) -> Script:
    """Draft `depth` right tokens, then wrong ones."""

    def script(sequence: SequenceState, count: int) -> Draft | None:
        tokens = _next(answers, sequence, count)
        return _chain([*tokens[:depth], *((token + 1) % vocab_size for token in tokens[depth:])])

    return script


def sometimes_right(answers: Answers, rate: float, vocab_size: int) -> Script:
    """Draft tokens that are right at this rate, in drafts of any length from 0."""
    rng = random.Random(0)

    def script(sequence: SequenceState, count: int) -> Draft | None:
        tokens = _next(answers, sequence, rng.randint(0, count))
        return _chain([t if rng.random() < rate else rng.randrange(vocab_size) for t in tokens])

    return script


def tree(answers: Answers, rate: float, vocab_size: int) -> Script:
    """Draft two siblings a depth, one of them right at this rate, and a wrong child of the wrong one."""
    rng = random.Random(0)

    def script(sequence: SequenceState, count: int) -> Draft | None:
        token_ids: list[int] = []
        parents: list[int] = []
        last = -1
        for token in _next(answers, sequence, count // 3):
            if rng.random() >= rate:
                token = (token + 2) % vocab_size
            other = (token + 1) % vocab_size
            siblings = [token, other] if rng.random() < 0.5 else [other, token]
            first = len(token_ids)
            token_ids += [*siblings, rng.randrange(vocab_size)]
            parents += [last, last, first + siblings.index(other)]
            last = first + siblings.index(token)
        return Draft(token_ids, parents) if token_ids else None

    return script


def _next(answers: Answers, sequence: SequenceState, count: int) -> list[int]:
    known = len(sequence.output_token_ids)
    return list(answers[sequence.request_id][known : known + count])


def _chain(tokens: list[int]) -> Draft | None:
    return Draft(tokens) if tokens else None
