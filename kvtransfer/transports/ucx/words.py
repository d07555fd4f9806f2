"""Words of memory that tell readers whether the sender's blocks are still valid.

Each connection has a word in the sender's memory. It holds the connection's token until the sender gives the
connection up, which it does before it reuses the blocks. A receiver reads the blocks of a piece, then the
word: if the token is still there, the blocks were unchanged until their read ended.
"""

from __future__ import annotations

import mmap
import secrets
import threading

import numpy as np

from kvtransfer.transports.ucx.agent import Memory

WORD_BYTES = 8
MAX_WORDS = 8192


class Words:
    """A page of words. `memory`, all of them, has to be registered."""

    def __init__(self) -> None:
        self._values = np.frombuffer(mmap.mmap(-1, MAX_WORDS * WORD_BYTES), dtype=np.uint64)
        self.memory = Memory(int(self._values.ctypes.data), WORD_BYTES, MAX_WORDS)
        self._free = list(range(MAX_WORDS))

    def take(self) -> ConnectionWord:
        """Return an unused word. Raises OSError if all are in use."""
        try:
            index = self._free.pop()
        except IndexError:
            raise OSError(f"more than {MAX_WORDS} connections") from None
        return ConnectionWord(self._values[index : index + 1], index, self._free)


class ConnectionWord:
    """One word, from `Words.take` to `release`. Its token was never used before."""

    def __init__(self, value: np.ndarray, index: int, free: list[int]) -> None:
        self.token = secrets.randbits(61) + 1
        self.memory = Memory(int(value.ctypes.data), WORD_BYTES, 1)
        self._value = value
        self._index: int | None = index
        self._free = free
        self._releasing = threading.Lock()

    def write(self, value: int) -> None:
        self._value[0] = value

    def read(self) -> int:
        return int(self._value[0])

    def release(self) -> None:
        """Zero the word, so that others can use it; when this returns it is zero. Idempotent, for any
        thread.
        """
        with self._releasing:
            if self._index is not None:
                self.write(0)
                self._free.append(self._index)
                self._index = None
