"""The search of `suffix.cpp` in numpy, as a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from protocol.speculation import SpeculativeConfig
from speculation.weightless.ngram import NOTHING

_ORDERS = (1, 2, 4, 8)
_RECENT = 64


@dataclass(slots=True)
class _Best:
    symbols: list[int] = field(default_factory=list)
    score: float = 0.0


def search(
    text: np.ndarray, count: int, options: SpeculativeConfig, earlier: np.ndarray, tenant: int | None
) -> list[int]:
    """Return at most `count` tokens that may follow `text` (int32 [length]).

    The search covers the text and the tenant's `earlier` outputs (int64 symbols, as in a `Corpus`).
    """
    best = _Best()
    last = text[::-1][: options.suffix_decoding_max_tree_depth - 1].astype(np.int64)
    _improve(best, np.append(text.astype(np.int64), NOTHING), len(text) - 1, last, count, options)
    if tenant is not None:
        _improve(best, earlier, len(earlier), last | tenant << 32, count, options)
    return [symbol & 0xFFFFFFFF for symbol in best.symbols]


def _improve(
    best: _Best,
    symbols: np.ndarray,
    num_places: int,
    last: np.ndarray,
    count: int,
    options: SpeculativeConfig,
) -> None:
    """Try each number of the `last` symbols, the last one first, that occurs in the leading places."""
    for length, places in reversed(list(_occurrences(symbols[:num_places], last))):
        allowed = int(min(count, length * options.suffix_decoding_max_spec_factor))
        limit = min(allowed, options.suffix_decoding_max_tree_depth - length)
        if limit > best.score:
            path, score = _walk(symbols, places, limit, options.suffix_decoding_min_token_prob)
            if score > best.score:
                best.symbols, best.score = path, score


def _occurrences(symbols: np.ndarray, last: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Return match lengths, and the places where such a match ends, the most recent first."""
    ends = recent = np.flatnonzero(symbols == last[0])
    for length in range(1, len(last) + 1):
        if length > 1:
            ends, recent = (
                some[symbols[some - (length - 1)] == last[length - 1]]
                for some in (ends[ends >= length - 1], recent[recent >= length - 1])
            )
        if length in _ORDERS:
            recent = ends[-_RECENT:]
        if not len(ends):
            return
        if len(recent):
            yield length, recent[::-1]


def _walk(symbols: np.ndarray, places: np.ndarray, limit: int, min_prob: float) -> tuple[list[int], float]:
    """Return the most frequent continuation, and the sum of its probabilities."""
    path: list[int] = []
    total, alive = 0, places
    while len(path) < limit:
        following = symbols[alive + 1]
        counts = Counter(following[following != NOTHING].tolist())
        symbol, most = counts.most_common(1)[0] if counts else (NOTHING, 0)
        if most == 0 or most / len(places) < min_prob:
            break
        path.append(symbol)
        total += most
        alive = alive[following == symbol] + 1
    return path, total / len(places)
