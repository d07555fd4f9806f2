"""One call at a time in a thread of its own, beside what its caller does meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Call = Callable[[], object]


class MaskThread:
    """The thread begins with the first call, and ends when nobody has this object any more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] | None = None
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_busy = False

    def begin(self, call: Call) -> None:
        """The one before has ended, as `wait` tells."""
        assert not self._is_busy
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(
                target=_work, args=(self._calls, self._ends), name=self._name, daemon=True
            ).start()
            weakref.finalize(self, self._calls.put, None)
        self._is_busy = True
        self._calls.put(call)

    def wait(self) -> None:
        """For the end of the call, if one was begun. Raises what it raised."""
        if self._is_busy:
            self._is_busy = False
            error = self._ends.get()
            if error is not None:
                raise error


def _work(calls: SimpleQueue[Call | None], ends: SimpleQueue[BaseException | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except BaseException as error:  # the caller's
            ends.put(error)
        else:
            ends.put(None)
        del call
