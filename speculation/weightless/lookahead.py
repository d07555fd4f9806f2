"""Lookahead decoding (Fu et al. 2024): the model drafts for itself, by Jacobi iteration while it decodes.

A step verifies a few n-grams that may follow the text's last token, as a tree, and runs a window of guesses
at later tokens, from which new n-grams arise. The n-grams come from the window and from the text itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np

from engine.devices.loaded_model import LoadedModel
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.drafter import ComputedRows
from speculation.weightless.ngram import TextDrafter

Ngram = tuple[int, ...]

_MAX_KEYS = 4096
"""Tokens whose n-grams are remembered for one request."""
_MAX_PLACES = 64
"""Most recent places of the text's last token whose n-grams are considered."""


class LookaheadDrafter(TextDrafter):
    """A drafter of at most `lookahead_ngram` - 1 tokens in a row, whatever number is asked for.

    If there is room for too few rows, the n-grams come first.
    """

    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        super().__init__()
        self._num_levels = options.lookahead_ngram - 1
        self._num_columns = options.lookahead_window
        self._num_guesses = options.lookahead_guesses
        self._masks = window_masks(self._num_levels, self._num_columns)
        self._eos = frozenset(target.eos_token_ids)
        self._windows: dict[str, LookaheadWindow] = {}
        self._pools: dict[str, NgramPool] = {}

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _draft(self, sequence: SequenceState, num_rows: int) -> Draft | None:
        name, tokens = sequence.request_id, self._updated(sequence).tokens
        if name not in self._windows:
            self._windows[name] = LookaheadWindow(tokens, self._num_levels, self._num_columns, self._eos)
            self._pools[name] = NgramPool(self._num_guesses)
        remembered = self._pools[name].starting_with(sequence.token_ids[-1])
        nodes, parents = tree(self._choose(remembered, ngrams_of(tokens, self._num_levels)), num_rows)
        if len(nodes) + len(self._masks) > num_rows:
            probes, masks = [], []
        else:
            probes = self._windows[name].probes()
            masks = [1 | mask << (len(nodes) + 1) for mask in self._masks]
        return Draft(nodes + probes, parents, masks) if nodes or probes else None

    def _choose(self, *sources: Iterable[Ngram]) -> list[Ngram]:
        """Return the first different n-grams, from the sources in turn."""
        in_turn = (ngram for turn in zip_longest(*sources) for ngram in turn if ngram is not None)
        return list(islice(dict.fromkeys(in_turn), self._num_guesses))

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        for each in computed:
            window = self._windows.get(each.sequence.request_id)
            if window is None or not each.probed:
                continue
            last, following = each.sequence.token_ids[each.start : each.start + 2]
            guesses = [following, *each.probed][-self._num_columns :]
            for first, ngram in window.advance(last, guesses):
                self._pools[each.sequence.request_id].add(first, ngram)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._windows.pop(request_id, None)
        self._pools.pop(request_id, None)


class LookaheadWindow:
    """Guesses at the tokens after the text's last one, in columns and levels.

    The token of level l in column c is a guess at the token c + l places after the last one, which itself is
    column 0 of level 0. It sees the text, level 0 up to its own column, and its column at lower levels. The
    model's likeliest tokens after the last level are the columns' next guesses: each column with its next
    guess is an n-gram. Then the levels move down by one, as the text grows.
    """

    def __init__(self, text: np.ndarray, num_levels: int, num_columns: int, eos: Collection[int]) -> None:
        """Begin with pieces of the text (int32 [length])."""
        pieces = np.arange(num_columns) * max(1, len(text) // num_columns)
        self._levels: list[list[int]] = [
            text[(pieces + level) % len(text)].tolist() for level in range(num_levels)
        ]
        self._eos = eos

    def probes(self) -> list[int]:
        """Return all tokens but column 0 of level 0, level by level."""
        return [token for level in self._levels for token in level][1:]

    def advance(self, last: int, guesses: list[int]) -> list[tuple[int, Ngram]]:
        """Add each column's next guess. Return the n-grams: first token, the others.

        An end-of-sequence token is never kept in the window: nothing follows it.
        """
        firsts = [last, *self._levels[0][1:]]
        columns = zip(*self._levels[1:], guesses, strict=True)
        ngrams = list(zip(firsts, columns, strict=True))
        guesses = [
            first if guess in self._eos else guess for first, guess in zip(firsts, guesses, strict=True)
        ]
        self._levels = [*self._levels[1:], guesses]
        return ngrams


def window_masks(num_levels: int, num_columns: int) -> list[int]:
    """Return, for each of a window's probes, the probes that it sees, itself included: bit i is probe i."""
    masks: list[int] = []
    for level in range(num_levels):
        for column in range(num_columns):
            row = (1 << column) - 1  # columns 1 .. column of level 0
            above = (num_columns - 1 + column + num_columns * (i - 1) for i in range(1, level + 1))
            masks.append(row | sum(1 << probe for probe in above))
    return masks[1:]


class NgramPool:
    """The `per_token` latest n-grams for each first token."""

    def __init__(self, per_token: int) -> None:
        self._per_token = per_token
        self._ngrams: dict[int, dict[Ngram, None]] = {}

    def add(self, first: int, ngram: Ngram) -> None:
        known = self._ngrams.pop(first, {})
        known.pop(ngram, None)
        known[ngram] = None
        if len(known) > self._per_token:
            del known[next(iter(known))]
        self._ngrams[first] = known
        if len(self._ngrams) > _MAX_KEYS:
            del self._ngrams[next(iter(self._ngrams))]

    def starting_with(self, first: int) -> Iterator[Ngram]:
        """Return the tokens after the first one of each n-gram, the latest n-gram first."""
        return reversed(self._ngrams.get(first, {}))


def ngrams_of(text: np.ndarray, length: int) -> Iterator[Ngram]:
    """Yield up to `length` tokens after earlier places of the text's last one, the most recent first."""
    for place in np.flatnonzero(text[:-1] == text[-1])[: -_MAX_PLACES - 1 : -1].tolist():
        yield tuple(text[place + 1 : place + 1 + length].tolist())


def tree(ngrams: Iterable[Ngram], num_nodes: int) -> tuple[list[int], list[int]]:
    """Return token and parent of each node of a tree with these paths, of the first `num_nodes` at most."""
    nodes: dict[tuple[int, int], int] = {}
    for ngram in ngrams:
        parent = -1
        for token in ngram:
            if (parent, token) not in nodes:
                if len(nodes) == num_nodes:
                    break
                nodes[parent, token] = len(nodes)
            parent = nodes[parent, token]
    return [token for _, token in nodes], [parent for parent, _ in nodes]
