"""Prompt lookup (Saxena 2023), and what all methods that draft from text alone have in common.

Prompt lookup drafts what followed a text's last tokens where they stood before.
The longest match counts, of `prompt_lookup_max` tokens down to `prompt_lookup_min`, and of several the most
recent. A match that overlaps the end repeats with it: `abab` goes on `abab`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from native.build import load_library, optional
from native.structs import fields
from protocol.speculation import SpeculativeConfig
from speculation.drafter import Drafter

NOTHING = -1
"""An end mark in the place of a token."""


class Text:
    """A sequence's tokens as int32 [length], at `address`, until the next `update`. A text `before` them, if
    any, ends with `NOTHING`, so that no draft continues from there.
    """

    def __init__(self, sequence: SequenceState, before: Sequence[int] = ()) -> None:
        self.sequence = sequence
        self._before = [*before, NOTHING] if before else []
        self.length = 0
        self.address = 0
        self._buffer = np.empty(0, np.int32)

    @property
    def tokens(self) -> np.ndarray:
        return self._buffer[: self.length]

    def update(self) -> None:
        """Append new tokens; start again if the known ones have changed."""
        token_ids, start = self.sequence.token_ids, len(self._before)
        known = max(self.length - start, 0)
        if known > len(token_ids) or (known and self._buffer[self.length - 1] != token_ids[known - 1]):
            known = 0
        length = start + len(token_ids)
        if length > len(self._buffer):
            buffer = np.empty(2 * length, np.int32)
            buffer[:start] = self._before
            buffer[start : start + known] = self._buffer[start : start + known]
            self._buffer, self.address = buffer, int(buffer.ctypes.data)
        self._buffer[start + known : length] = token_ids[known:]
        self.length = length


class TextBatch(ctypes.Structure):
    """Texts to draft for, with room for the drafts."""

    _fields_ = fields(Path(__file__).parent / "repeats.h", "Batch")

    def __init__(self, texts: Sequence[Text], counts: Sequence[int]) -> None:
        size, stride = len(texts), max(counts, default=0)
        addresses = [text.address for text in texts]
        lengths = [text.length for text in texts]
        self._inputs = (ctypes.c_int64 * (3 * size))(*addresses, *lengths, *counts)
        self._drafts = (ctypes.c_int32 * (size * stride))()
        self._found = (ctypes.c_int64 * size)()
        inputs, column = ctypes.addressof(self._inputs), ctypes.sizeof(self._found)
        columns = inputs, inputs + column, inputs + 2 * column
        drafts, found = ctypes.addressof(self._drafts), ctypes.addressof(self._found)
        super().__init__(*columns, drafts, found, size, stride)

    def drafted(self) -> list[list[int]]:
        """Return each text's draft, once a search has run."""
        starts = range(0, len(self._drafts), self.stride)
        return [self._drafts[start : start + count] for start, count in zip(starts, self._found, strict=True)]


class TextDrafter(Drafter):
    """A `Drafter` without KV and hidden states that keeps its requests' texts."""

    def __init__(self) -> None:
        self._texts: dict[str, Text] = {}

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        self._text(sequence)

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _text(self, sequence: SequenceState) -> Text:
        text = self._texts.get(sequence.request_id)
        if text is None or text.sequence is not sequence:
            text = self._texts[sequence.request_id] = self._begun(sequence)
        return text

    def _begun(self, sequence: SequenceState) -> Text:
        return Text(sequence)

    def _updated(self, sequence: SequenceState) -> Text:
        text = self._text(sequence)
        text.update()
        return text


logger = logging.getLogger("tandem.speculation")


@optional(logger, "n-grams draft nothing, since their search needs a C++ compiler")
def compiled() -> Callable[..., None]:
    return load_library(Path(__file__).parent / "ngram.cpp", keep_gil=True).tandem_ngram


class NgramDrafter(TextDrafter):
    def __init__(self, options: SpeculativeConfig, *_: object) -> None:
        super().__init__()
        self._bounds = options.prompt_lookup_min, options.prompt_lookup_max
        self._compiled = compiled()
        self.is_able = self._compiled is not None

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        assert self._compiled is not None
        batch = TextBatch([self._updated(sequence) for sequence in sequences], counts)
        self._compiled(ctypes.byref(batch), *self._bounds)
        return [Draft(token_ids) if token_ids else None for token_ids in batch.drafted()]
