"""Loads of adapters from disk while the worker's loop runs.

A network disk may stall, so each adapter is read in a thread of its own, and a stalled read fails only the
requests that wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from engine.lora.config import AdapterError
from engine.lora.files import AdapterFiles
from engine.lora.table import Adapters
from protocol.outputs import ErrorKind
from protocol.requests import EngineRequest
from worker.parts import Counters

log = logging.getLogger(__name__)

STALL_S = 10.0
"""[s] Time without progress after which a read has failed. A working network disk answers within
milliseconds, and a disk whose server restarts within some seconds.
"""

READS_AT_ONCE = 4
"""Number of concurrent reads. Each read holds an adapter's bytes, so further reads wait."""

MOST_STALLED = 32
"""Number of stalled reads, whose threads cannot be ended, from which on no new read begins."""

_REQUEST, _NAME = "request", "name"
"""The two kinds of keys in `AdapterLoads._pending`: a request waits for an adapter, or a name gets one."""

Problem = tuple[ErrorKind, str]
OnEnd = Callable[[AdapterFiles | None, Problem | None], None]


@dataclass(eq=False)
class _Read:
    path: str
    moved_at: float = field(default_factory=time.monotonic)
    """Time of the read's last progress (monotonic seconds)."""
    result: AdapterFiles | AdapterError | None = None

    def on_piece(self) -> None:
        self.moved_at = time.monotonic()


@dataclass(eq=False)
class _PendingLoad:
    """A pending load: `on_end` gets the adapter's files, if they had to be read, or the problem."""

    path: str
    digest: str
    on_end: OnEnd


class AdapterLoads:
    """A worker's adapter loads. For the loop's thread, which calls `poll` regularly and after each `wake`."""

    def __init__(self, adapters: Adapters | None, counters: Counters, wake: Callable[[], None]) -> None:
        """Accept no adapters if `adapters` is None, i.e. without --enable-lora."""
        self._adapters = adapters
        self._counters = counters
        self._wake = wake
        self._pending: dict[tuple[str, str], _PendingLoad] = {}
        """The pending loads, by kind and by request id or adapter name; oldest first."""
        self._reads: dict[str, _Read] = {}
        """The reads in progress, by path."""
        self._stalled: dict[str, _Read] = {}
        """The abandoned reads whose threads are still alive, by path."""
        self._done: SimpleQueue[_Read] = SimpleQueue()

    def __contains__(self, request_id: str) -> bool:
        """Return whether the request waits for its adapter."""
        return (_REQUEST, request_id) in self._pending

    def request_ids(self) -> list[str]:
        """Return the ids of the requests that wait for their adapters."""
        return [key for kind, key in self._pending if kind == _REQUEST]

    def awaits(self, digest: str) -> bool:
        return any(load.digest == digest for load in self._pending.values())

    def load(self, name: str, path: str, digest: str, on_end: Callable[[str, Problem | None], None]) -> None:
        """Load the folder's adapter, then call `on_end` with the result, unless `unload` comes first."""
        adapters = self._adapters
        if adapters is None:
            on_end("", ("invalid", "this worker takes no adapters: --enable-lora"))
            return

        def end(files: AdapterFiles | None, problem: Problem | None) -> None:
            found = ""
            try:
                found = adapters.load(name, path, digest, files).digest if problem is None else ""
            except AdapterError as error:
                problem = "invalid", str(error)
            on_end(found, problem)

        self._want((_NAME, name), _PendingLoad(path, digest, end))

    def unload(self, name: str) -> None:
        self._pending.pop((_NAME, name), None)
        if self._adapters is not None:
            self._adapters.unload(name)

    def require(self, request: EngineRequest, then: Callable[[Problem | None], None]) -> None:
        """Call `then` once the request's adapter is loaded (at once if it has none), or with the problem.
        `then` is not called if `abort` or another call for the same request comes first.
        """
        adapters, adapter = self._adapters, request.adapter
        if adapter is None or adapters is None:  # the engine refuses a request that it cannot serve
            then(None)
            return

        def end(files: AdapterFiles | None, problem: Problem | None) -> None:
            try:
                if problem is None:
                    adapters.require(adapter, files)
            except AdapterError as error:
                problem = "invalid", str(error)
            then(problem if problem is None else (problem[0], f"model: {adapter.name}: {problem[1]}"))

        self._want((_REQUEST, request.request_id), _PendingLoad(adapter.path, adapter.digest, end))

    def abort(self, request_id: str) -> None:
        """Stop waiting for the request's adapter. Unknown ids are ignored."""
        self._pending.pop((_REQUEST, request_id), None)

    def poll(self, now: float) -> None:
        """Finish the completed reads, abandon the stalled ones and start new ones."""
        while not self._done.empty():
            read = self._done.get()
            if self._stalled.pop(read.path, None) is not None:
                log.warning("adapter %s: its files could be read after all", read.path)
            elif self._reads.pop(read.path, None) is not None:
                self._end(read)
        for read in [read for read in self._reads.values() if now - read.moved_at > STALL_S]:
            self._stalled[read.path] = self._reads.pop(read.path)
            self._counters.add("adapter_loads_stalled_total")
            log.error("adapter %s: %s", read.path, _STALL)
        self._begin_reads()

    def _want(self, key: tuple[str, str], load: _PendingLoad) -> None:
        assert self._adapters is not None
        if self._adapters.has(load.digest):
            load.on_end(None, None)
            return
        self._pending[key] = load
        self._begin_reads()

    def _begin_reads(self) -> None:
        for key, load in list(self._pending.items()):
            if load.path in self._reads:
                continue
            if load.path in self._stalled or len(self._stalled) >= MOST_STALLED:
                del self._pending[key]
                load.on_end(None, ("timeout", f"{load.path}: {_STALL}"))
            elif len(self._reads) < READS_AT_ONCE:
                self._reads[load.path] = read = _Read(load.path)
                threading.Thread(target=self._read, args=(read,), name="adapter", daemon=True).start()

    def _read(self, read: _Read) -> None:
        """Read an adapter's files. Runs in a thread of its own."""
        assert self._adapters is not None
        try:
            read.result = self._adapters.read(read.path, read.on_piece)
        except AdapterError as error:
            read.result = error
        except Exception as error:
            log.exception("adapter %s cannot be read", read.path)
            read.result = AdapterError(f"{read.path}: {type(error).__name__}: {error}")
        self._done.put(read)
        self._wake()

    def _end(self, read: _Read) -> None:
        for key, load in [item for item in self._pending.items() if item[1].path == read.path]:
            if self._pending.pop(key, None) is None:
                continue
            if isinstance(read.result, AdapterError):
                load.on_end(None, ("invalid", str(read.result)))
            else:
                load.on_end(read.result, None)


_STALL = f"nothing came from its files for {STALL_S:g} s: the file system that they are on does not answer"
