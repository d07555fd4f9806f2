"""Suffix decoding (Oliaro et al. 2024): what most often followed a text's last tokens, here and earlier.

For each number of last tokens that occurred before, the most frequent next token is taken again and again.
The sum of the path's probabilities up to each token says how many may be accepted, and the best sum wins,
over all those numbers, and over the request's own text and the tenant's earlier outputs.

Frequencies are those among the 64 most recent occurrences (see `suffix.cpp`). Earlier outputs take up to
40 MiB.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.draft import Draft
from engine.sequence import SequenceState
from native.build import BuildError, load_library
from protocol.speculation import SpeculativeConfig
from speculation.weightless import suffix_plain
from speculation.weightless.corpus import Corpus, Ring
from speculation.weightless.text import Batch, Text, TextDrafter

logger = logging.getLogger("tandem.speculation")

CAPACITY = 2**20
"""Symbols of earlier outputs: 40 MiB."""
PLAIN_CAPACITY = 2**16
"""The same where the search is not compiled, and reads all of them for each request."""


class Settings(ctypes.Structure):
    """`Settings` of `suffix.cpp`."""

    _fields_ = (
        ("depth", ctypes.c_int64),
        ("max_spec_factor", ctypes.c_double),
        ("min_token_prob", ctypes.c_double),
    )


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled search, built at the first call; None where it can't be."""
    try:
        library = load_library(Path(__file__).parent / "suffix.cpp", Batch, Settings, Ring, keep_gil=True)
    except BuildError as error:
        logger.warning("suffixes are looked up with numpy, in fewer earlier outputs: %s", error)
        return None
    pointer = ctypes.c_void_p
    library.tandem_suffix_enter.argtypes = [pointer, ctypes.c_uint32, ctypes.c_int64]
    library.tandem_suffix_enter.restype = None
    library.tandem_suffix_search.argtypes = [pointer] * 4
    library.tandem_suffix_search.restype = None
    return library


class SuffixDrafter(TextDrafter):
    def __init__(self, options: SpeculativeConfig) -> None:
        super().__init__()
        self._options = options
        self._settings = Settings(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        self._library = compiled()
        self._corpus: Corpus | None = None
        if options.suffix_decoding_max_cached_requests:
            enter = self._library.tandem_suffix_enter if self._library is not None else None
            capacity = CAPACITY if enter is not None else PLAIN_CAPACITY
            self._corpus = Corpus(options.suffix_decoding_max_cached_requests, capacity, enter)

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        texts = [self._updated(sequence) for sequence in sequences]
        tenants = [self._tenant(sequence) for sequence in sequences]
        search = self._search_plainly if self._library is None else self._search
        return [Draft(token_ids) if token_ids else None for token_ids in search(texts, counts, tenants)]

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and self._corpus is not None:
            self._corpus.add(text.sequence.request.cache_salt, text.sequence.output_token_ids)

    def _tenant(self, sequence: SequenceState) -> int | None:
        return None if self._corpus is None else self._corpus.tenant(sequence.request.cache_salt)

    def _search(
        self, texts: Sequence[Text], counts: Sequence[int], tenants: Sequence[int | None]
    ) -> list[list[int]]:
        assert self._library is not None
        batch = Batch(texts, counts)
        ring = ctypes.byref(self._corpus.ring()) if self._corpus is not None else None
        numbers = (ctypes.c_int64 * len(tenants))(*(-1 if tenant is None else tenant for tenant in tenants))
        self._library.tandem_suffix_search(
            ctypes.byref(batch), ctypes.byref(self._settings), ring, ctypes.byref(numbers)
        )
        return batch.drafted()

    def _search_plainly(
        self, texts: Sequence[Text], counts: Sequence[int], tenants: Sequence[int | None]
    ) -> list[list[int]]:
        earlier = self._corpus.symbols() if self._corpus is not None else np.empty(0, np.int64)
        return [
            suffix_plain.search(text.tokens, count, self._options, earlier, tenant)
            for text, count, tenant in zip(texts, counts, tenants, strict=True)
        ]
