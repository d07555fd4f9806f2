"""Objects that live in separate processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

_JOIN_S = 10.0

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["bench.transfer.sides"])


class RemoteObject(ABC):
    """An object in another process, whose methods are called one at a time."""

    @abstractmethod
    def begin(self, method: str, *arguments: Any) -> None:
        """Begin a call; `end` waits for its result."""

    @abstractmethod
    def end(self) -> Any: ...

    @abstractmethod
    def close(self) -> None: ...

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessEndedError(RuntimeError):
    """A process ended before it answered."""


class ProcessObject(RemoteObject):
    """The object that `make(*arguments)` returns in a new process.

    `environment` is set before in that process. An exception there is raised here as RuntimeError.
    """

    def __init__(
        self, make: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        self._pipe, theirs = processes.Pipe()
        self.process = processes.Process(
            target=_serve, args=(theirs, make, arguments, dict(environment or {})), daemon=True
        )
        self.process.start()
        theirs.close()
        self.end()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def end(self) -> Any:
        try:
            done, result = self._pipe.recv()
        except EOFError:
            raise ProcessEndedError("a measuring process ended before its time") from None
        if not done:
            raise RuntimeError(f"in a measuring process: {result}")
        return result

    def close(self) -> None:
        self._pipe.close()
        self.process.join(_JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(
    pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        thing: Any = None
        try:
            thing = make(*arguments)
            pipe.send((True, None))
            while True:
                method, values = pipe.recv()
                pipe.send((True, getattr(thing, method)(*values)))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            raise
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            if thing is not None:
                thing.close()
