"""Prompt lookup (Saxena 2023): drafts the tokens that followed an earlier occurrence of the text's last
tokens.

The longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens counts, and of several the most recent.
A match that overlaps the end repeats: `abab` continues with `abab`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from native.build import BuildError, declare, load_library
from protocol.speculation import SpeculativeConfig
from speculation.weightless.text import TextBatch, TextDrafter

logger = logging.getLogger("tandem.speculation")


@functools.cache
def compiled() -> Callable[..., None] | None:
    """Return the compiled search, built at the first call; None if it can't be built."""
    try:
        library = load_library(Path(__file__).parent / "ngram.cpp", TextBatch, keep_gil=True)
    except BuildError as error:
        logger.warning("n-grams are looked up with numpy: %s", error)
        return None
    return declare(library, "tandem_ngram", None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class NgramDrafter(TextDrafter):
    def __init__(self, options: SpeculativeConfig) -> None:
        super().__init__()
        self._bounds = options.prompt_lookup_min, options.prompt_lookup_max
        self._compiled = compiled()

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        texts = [self._updated(sequence) for sequence in sequences]
        if self._compiled is None:
            pairs = zip(texts, counts, strict=True)
            drafted = [look_up(text.tokens, count, *self._bounds) for text, count in pairs]
        else:
            batch = TextBatch(texts, counts)
            self._compiled(ctypes.byref(batch), *self._bounds)
            drafted = batch.drafted()
        return [Draft(token_ids) if token_ids else None for token_ids in drafted]


def look_up(text: np.ndarray, count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` tokens that may follow the text (int32 [length]); none without a match."""
    end = _find(text, shortest, longest)
    if end is None:
        return []
    following = text[end + 1 : end + 1 + count].tolist()
    return [following[i % len(following)] for i in range(count)]


def _find(text: np.ndarray, shortest: int, longest: int) -> int | None:
    """Return the most recent end of the longest earlier match of the text's last tokens."""
    end = None
    ends = np.flatnonzero(text[:-1] == text[-1])
    for matched in range(1, longest + 1):
        if not len(ends):
            break
        if matched >= shortest:
            end = int(ends[-1])
        ends = ends[ends >= matched]
        ends = ends[text[ends - matched] == text[-1 - matched]] if len(ends) else ends
    return end
