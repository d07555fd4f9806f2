"""Suffix decoding (Oliaro et al. 2024): drafts what most often followed a text's last tokens, here and
earlier.

For each number of last tokens that occurred before, the most frequent next token is taken again and again.
The sum of the path's probabilities up to each token is the expected number of accepted tokens. The best sum
wins, over all numbers of last tokens, the request's own text (after the client's prediction of the answer)
and the tenant's earlier outputs.

Frequencies count the 64 most recent occurrences (see `suffix.cpp`). Earlier outputs take up to 40 MiB.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from native.build import load_library, optional
from native.structs import fields
from protocol.speculation import SpeculativeConfig
from speculation.weightless.ngram import NOTHING, Text, TextBatch, TextDrafter

logger = logging.getLogger("tandem.speculation")

CAPACITY = 2**20
"""Symbols of earlier outputs: 40 MiB."""
_SOURCE = Path(__file__).parent / "suffix.cpp"


class SuffixArgs(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Settings")


@optional(logger, "suffixes draft nothing, since their search needs a C++ compiler")
def compiled() -> ctypes.CDLL:
    return load_library(_SOURCE, keep_gil=True)


class SuffixDrafter(TextDrafter):
    def __init__(self, options: SpeculativeConfig, *_: object) -> None:
        super().__init__()
        self._settings = SuffixArgs(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        self._library = compiled()
        self.is_able = self._library is not None
        self._corpus: Corpus | None = None
        max_outputs = options.suffix_decoding_max_cached_requests
        if max_outputs and self._library is not None:
            self._corpus = Corpus(max_outputs, CAPACITY, self._library.tandem_suffix_enter)

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        assert self._library is not None
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
        """Return the tenant's number, -1 if it has no earlier outputs."""
        tenant = None if self._corpus is None else self._corpus.tenant(sequence.request.cache_salt)
        return -1 if tenant is None else tenant


NUM_ORDERS = 4
"""The chains that each place is in, as in `suffix.cpp`."""
_MODULUS = 2**32


class Ring(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Corpus")


@dataclass(slots=True)
class _Tenant:
    number: int
    num_outputs: int = 0


class Corpus:
    """The latest outputs, at most `max_outputs` of all tenants together, in `capacity` (a power of two)
    symbols with an end mark each; the oldest make room for new ones.

    A symbol takes 40 bytes: most are for the chains of the search, to which `enter` (corpus, first place,
    number of symbols) adds an output.
    """

    def __init__(self, max_outputs: int, capacity: int, enter: Callable[..., None]) -> None:
        self._max_outputs = max_outputs
        self._capacity = capacity
        self._symbols = np.zeros(capacity, np.int64)
        self._enter = enter
        self._chains = np.zeros((2, capacity, NUM_ORDERS), np.uint32)
        self._addresses = [int(array.ctypes.data) for array in (self._symbols, *self._chains)]
        self._outputs: deque[tuple[str, int]] = deque()
        self._tenants: dict[str, _Tenant] = {}
        self._next_number = 0
        self._oldest = self._end = 0

    def tenant(self, salt: str) -> int | None:
        tenant = self._tenants.get(salt)
        return None if tenant is None else tenant.number

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Keep an output, or its end if it is longer than the ring. Single tokens are not kept."""
        output = output[-(self._capacity - 1) :]
        if len(output) < 2:
            return
        while len(self._outputs) >= self._max_outputs or self._num_free <= len(output):
            self._drop_oldest()
        if salt not in self._tenants:
            self._tenants[salt] = _Tenant(self._next_number)
            self._next_number += 1
        tenant = self._tenants[salt]
        tenant.num_outputs += 1
        symbols = np.array([*output, NOTHING], np.int64)
        symbols[:-1] |= tenant.number << 32
        start, self._end = self._end, self._end + len(symbols)
        self._symbols[np.arange(start, self._end) % self._capacity] = symbols
        self._enter(ctypes.byref(self.ring()), start % _MODULUS, len(output))
        self._outputs.append((salt, len(symbols)))

    def ring(self) -> Ring:
        return Ring(*self._addresses, self._capacity - 1, self._oldest % _MODULUS, self._end % _MODULUS)

    @property
    def _num_free(self) -> int:
        return self._capacity - (self._end - self._oldest)

    def _drop_oldest(self) -> None:
        salt, length = self._outputs.popleft()
        self._oldest += length
        self._tenants[salt].num_outputs -= 1
        if not self._tenants[salt].num_outputs:
            del self._tenants[salt]
