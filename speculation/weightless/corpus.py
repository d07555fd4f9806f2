"""The outputs of earlier requests, for suffix decoding: the newest ones, in a ring of bounded size.

A tenant finds only its own: each has an alphabet, in which a symbol is the tenant's number and the token's.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NOTHING = -1
"""In the place of a symbol or a token: the text ends here."""
NUM_ORDERS = 4
"""Chains that a place is in, as in `suffix.cpp`."""
_MODULUS = 2**32


class Ring(ctypes.Structure):
    """`Corpus` of `suffix.cpp`."""

    _fields_ = (
        ("symbols", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("mask", ctypes.c_uint32),
        ("oldest", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
    )


@dataclass(slots=True)
class _Tenant:
    number: int
    num_outputs: int = 0


class Corpus:
    """At most `max_outputs` outputs of all tenants together, of at most `capacity` (a power of two) symbols
    with the end of each; the oldest make room for new ones.

    It takes 40 bytes a symbol: most are for the chains of the search, in which `enter` (corpus, first place,
    number of symbols) puts an output.
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
        """The number of a tenant that has outputs here."""
        tenant = self._tenants.get(salt)
        return None if tenant is None else tenant.number

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Keep an output, or its end if it is longer than the ring. A single token teaches nothing."""
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
