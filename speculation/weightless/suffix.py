"""Suffix decoding (Oliaro et al. 2024): what most often followed a text's last tokens, here and earlier.

For each number of last tokens that occurred before, the most frequent next token is taken again and again.
The sum of the path's probabilities up to each token says how many may be accepted, and the best sum wins,
over all those numbers, and over the request's own text, with the client's prediction of the answer before it,
and the tenant's earlier outputs.

Frequencies are those among the 64 most recent occurrences (see `suffix.cpp`). Earlier outputs take up to
40 MiB.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from native.build import BuildError, declare, load_library
from protocol.speculation import SpeculativeConfig
from speculation.weightless.corpus import Corpus, Ring
from speculation.weightless.text import Text, TextBatch, TextDrafter

logger = logging.getLogger("tandem.speculation")

CAPACITY = 2**20
"""Symbols of earlier outputs: 40 MiB."""


class SuffixArgs(ctypes.Structure):
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
        library = load_library(
            Path(__file__).parent / "suffix.cpp", TextBatch, SuffixArgs, Ring, keep_gil=True
        )
    except BuildError as error:
        logger.warning("n-grams are looked up instead of suffixes, which need a C++ compiler: %s", error)
        return None
    pointer = ctypes.c_void_p
    declare(library, "tandem_suffix_enter", None, pointer, ctypes.c_uint32, ctypes.c_int64)
    declare(library, "tandem_suffix_search", None, *[pointer] * 5)
    return library


class SuffixDrafter(TextDrafter):
    def __init__(self, options: SpeculativeConfig) -> None:
        """There is a compiler."""
        super().__init__()
        library = compiled()
        assert library is not None
        self._settings = SuffixArgs(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        self._library = library
        self._corpus: Corpus | None = None
        if options.suffix_decoding_max_cached_requests:
            max_outputs = options.suffix_decoding_max_cached_requests
            self._corpus = Corpus(max_outputs, CAPACITY, library.tandem_suffix_enter)

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        batch = TextBatch([self._updated(sequence) for sequence in sequences], counts)
        ring = ctypes.byref(self._corpus.ring()) if self._corpus is not None else None
        tenants = (ctypes.c_int64 * len(sequences))(*map(self._tenant, sequences))
        lengths = [len(sequence.request.prediction) for sequence in sequences]
        predicted = (ctypes.c_int64 * len(sequences))(*lengths)
        self._library.tandem_suffix_search(
            *map(ctypes.byref, (batch, self._settings)), ring, *map(ctypes.byref, (tenants, predicted))
        )
        return [
            Draft(token_ids, num_predicted=count) if token_ids else None
            for token_ids, count in zip(batch.drafted(), predicted, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and self._corpus is not None:
            self._corpus.add(text.sequence.request.cache_salt, text.sequence.output_token_ids)

    def _begun(self, sequence: SequenceState) -> Text:
        return Text(sequence, before=sequence.request.prediction)

    def _tenant(self, sequence: SequenceState) -> int:
        """Its number, -1 if nothing is known of it."""
        tenant = None if self._corpus is None else self._corpus.tenant(sequence.request.cache_salt)
        return -1 if tenant is None else tenant
