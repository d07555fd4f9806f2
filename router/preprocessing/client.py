"""The router's side of the preprocessor: starts and replaces the process, sends tasks, compiles grammars."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import blake2b
from typing import IO, Literal

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError, TandemError
from router.errors import ApiError, unavailable
from router.grammars.structured_outputs import AskedGrammar
from router.preprocessing import tasks
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
"""Most tasks that run at once."""
MIN_DEADLINE_S = 16.0
"""Time limit from a task's request to its answer, in addition to twice its CPU time limit."""
START_TIMEOUT_S = 60.0
ACCEPT_TIMEOUT_S = 5.0
"""Time in which the preprocessor must accept a task, once it has started."""

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)
"""Signals that a library's own fault causes."""

Failure = Literal["cpu_limit", "crashed", "late", "ended", "stuck"]


class CpuLimitError(TandemError):
    """A task has used up its CPU time limit."""


class CrashError(TandemError):
    """A library has crashed in a task, and would crash again."""


class Preprocessor:
    """A process for tasks, which starts with the first one. `failed` counts tasks without an answer."""

    def __init__(
        self, config: ServeConfig, tokenizer: Tokenizer, failed: Callable[[Failure], None] = lambda _: None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._failed = failed
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._process: _Process | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    async def run(self, call: tasks.TaskCall, argument: bytes) -> bytes:
        """Run a task on its argument and return the result.

        Raises the task's own `InvalidRequestError` or `ApiError`, `CpuLimitError`, `CrashError`, and an
        `ApiError` 503 if the host is too busy. A task whose process was killed is tried twice more: the
        second try may meet a process that is about to end.
        """
        task, deadline_s = call.task, MIN_DEADLINE_S + 2 * call.cpu_s
        header = tasks.framed(msgspec.msgpack.encode(call))
        try:
            async with asyncio.timeout(deadline_s), self._at_once:
                for _ in range(3):
                    try:
                        return await self._running().ask(header, argument)
                    except _NoAnswerError as error:
                        self._note(error.reason, task)
        except CpuLimitError:
            self._note("cpu_limit", task)
            raise
        except CrashError:
            self._note("crashed", task)
            raise
        except TimeoutError:
            self._note("late", task)
            reason = f"the server is busy: it could not preprocess the request within {deadline_s:g} s"
            raise unavailable(reason) from None
        raise unavailable("the process that preprocesses requests has ended")

    def _running(self) -> _Process:
        if self._process is None or self._process.has_ended:
            self.close()
            self._process = _Process(self._setup.fileno())
        return self._process

    @cached_property
    def _setup(self) -> IO[bytes]:
        """A file with the `Setup`, which has megabytes."""
        tokenizer = self._tokenizer
        setup = tasks.Setup(self._config, tokenizer.as_json(), tokenizer.settings())
        file = tempfile.TemporaryFile()  # noqa: SIM115
        file.write(msgspec.msgpack.encode(setup))
        file.flush()
        return file

    def _note(self, failure: Failure, task: str) -> None:
        self._failed(failure)
        logger.warning("the preprocessor gave no answer to a task %r: %s", task, failure)


class _NoAnswerError(Exception):
    def __init__(self, reason: Literal["ended", "stuck"]) -> None:
        super().__init__(reason)
        self.reason: Literal["ended", "stuck"] = reason


class _Process:
    """A running `router.preprocessing.process`. It is killed if it does not accept a task in time."""

    def __init__(self, setup: int) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [sys.executable, "-m", "router.preprocessing.process"]
            descriptors = [theirs.fileno(), setup]
            command += map(str, descriptors)
            self._process = subprocess.Popen(
                command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0
            )
        self._accepts_until = time.monotonic() + START_TIMEOUT_S
        self._idle: list[socket.socket] = []
        """Connections to children without a task."""

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill the process with its children, and wait for its end."""
        self._control.close()
        self._leave_idle()
        if not self.has_ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    async def ask(self, header: bytes, argument: bytes) -> bytes:
        """Return the task's result. Cancellation ends the task. Raises `_NoAnswerError`, and like `run`."""
        connection = await self._accepting(header)
        loop, is_idle = asyncio.get_running_loop(), False
        try:
            await loop.sock_sendall(connection, tasks.LENGTH.pack(len(argument)))
            await loop.sock_sendall(connection, argument)
            state, kind = await _read(connection, 1), await _read(connection, 1)
            if state == tasks.DIED:
                raise _death(kind[0])
            content = await _read(
                connection, *tasks.LENGTH.unpack(await _read(connection, tasks.LENGTH.size))
            )
            if is_idle := state == tasks.DONE and not self.has_ended:
                self._idle.append(connection)
        except OSError:
            raise _NoAnswerError("ended") from None
        finally:
            if not is_idle:
                connection.close()
        if kind == tasks.REFUSED:
            raise msgspec.msgpack.decode(content, type=tasks.TaskError).to_error()
        return content

    async def _accepting(self, header: bytes) -> socket.socket:
        """Return a connection to a child, idle or new, that has accepted the task."""
        if is_new := not self._idle:
            connection, theirs = socket.socketpair()
            connection.setblocking(False)
        else:
            connection = self._idle.pop()
        until = max(self._accepts_until, time.monotonic() + ACCEPT_TIMEOUT_S)
        try:
            if is_new:
                with theirs:
                    socket.send_fds(self._control, [tasks.ACCEPTED], [theirs.fileno()])
            async with asyncio.timeout(until - time.monotonic()):
                await asyncio.get_running_loop().sock_sendall(connection, header)
                answer = await _read(connection, 1)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | _NoAnswerError):
                raise
            is_stuck = isinstance(error, TimeoutError)
            if not is_new and not is_stuck:
                self._leave_idle()  # whatever ended this child may have ended others
                return await self._accepting(header)
            # A killed process still counts as running while the kernel frees its memory: wait for its end, or
            # the next try would ask this process again.
            await asyncio.to_thread(self.close)
            raise _NoAnswerError("stuck" if is_stuck else "ended") from None
        self._accepts_until = 0.0
        if answer == tasks.DIED:
            connection.close()
            raise _NoAnswerError("ended")
        return connection

    def _leave_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


async def _read(connection: socket.socket, size: int) -> bytes:
    read = bytearray(size)
    left = memoryview(read)
    while left:
        received = await asyncio.get_running_loop().sock_recv_into(connection, left)
        if not received:
            raise _NoAnswerError("ended")
        left = left[received:]
    return bytes(read)


def _death(number: int) -> Exception:
    """Return the error of a task whose child was ended by a signal, or ended by itself."""
    if number == signal.SIGPROF:
        return CpuLimitError("it takes more CPU time than it may")
    return CrashError(signal.Signals(number).name) if number in CRASHES else _NoAnswerError("ended")


COMPILE_CPU_S = 2.0
"""CPU time limit of a grammar: from the request's fields to the first compilation."""
MAX_KNOWN_BYTES = 64 * 1024 * 1024
"""Most bytes of remembered grammars and errors; the least recently used ones are dropped."""

ENTRY_BYTES = 256
"""Approximate bytes of an entry in addition to its text."""

RETRY_S = 1.0

Outcome = str | InvalidRequestError


class GrammarCompiler:
    """A cache of compiled grammars. A grammar that reaches the CPU time limit is not remembered."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        """Outcomes by the hash of their requests, the least recently used first."""
        self._known_bytes = 0

    async def prepare(self, grammars: Iterable[AskedGrammar]) -> None:
        """Compile grammars early, so that requests for them need not wait."""
        for asked in grammars:
            while True:
                try:
                    await self._outcome(asked)
                    break
                except (ApiError, InvalidRequestError) as error:
                    logger.warning("the grammar of %s is not compiled yet: %s", asked.field, error)
                    await asyncio.sleep(RETRY_S)

    async def compile(self, asked: AskedGrammar) -> str:
        """Return the grammar in llguidance's form. Raises `InvalidRequestError`, and `ApiError` 503 if the
        server is too busy to decide.
        """
        outcome = await self._outcome(asked)
        if isinstance(outcome, InvalidRequestError):
            raise InvalidRequestError(outcome.field, outcome.message)
        return outcome

    async def _outcome(self, asked: AskedGrammar) -> Outcome:
        key = blake2b(asked.request, digest_size=16).digest()
        outcome = self._known.get(key) or await self._compiled(asked)
        if key not in self._known:
            self._known[key] = outcome
            self._known_bytes += _size(outcome)
        self._known.move_to_end(key)
        while self._known_bytes > MAX_KNOWN_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= _size(oldest)
        return outcome

    async def _compiled(self, asked: AskedGrammar) -> Outcome:
        try:
            call = tasks.TaskCall(tasks.GRAMMAR, COMPILE_CPU_S)
            return (await self._preprocessor.run(call, asked.request)).decode()
        except CpuLimitError:
            reason = f"it takes more than {COMPILE_CPU_S:g} s of CPU time to compile, the limit"
            raise InvalidRequestError(asked.field, reason) from None
        except CrashError as error:
            reason = f"the compiler crashes on it ({error}), as on rules that are nested too deeply"
            return InvalidRequestError(asked.field, reason)
        except InvalidRequestError as error:
            return error


def _size(outcome: Outcome) -> int:
    return sys.getsizeof(outcome if isinstance(outcome, str) else outcome.message) + ENTRY_BYTES
