"""Tells whether a grammar can be served, before a worker gets it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from itertools import count

from protocol.errors import InvalidRequestError
from router.errors import unavailable
from router.structured_outputs import Grammar
from router.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 2.0
MAX_AT_ONCE = 4
"""Grammars that are compiled at a time."""
MAX_KNOWN = 4096
"""Grammars whose verdict is kept, those used last: a hash and a line of text each."""


class GrammarCompiler:
    """Has each grammar compiled once, by a process that the first one starts. What takes too long is not
    remembered.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    async def check(self, grammar: Grammar) -> None:
        """Raises `InvalidRequestError`, within `COMPILE_TIMEOUT_S` from when it is its turn."""
        key = blake2b(grammar.text.encode(), digest_size=16).digest()
        problem = self._problems.get(key)
        if problem is None:
            async with self._at_once:
                problem = await self._problem(grammar)
            self._problems[key] = problem
            if len(self._problems) > MAX_KNOWN:
                self._problems.popitem(last=False)
        self._problems.move_to_end(key)
        if problem:
            raise InvalidRequestError(grammar.field, problem)

    async def _problem(self, grammar: Grammar) -> str:
        process = await self._running()
        if process.problem:
            return process.problem
        try:
            return await asyncio.wait_for(process.ask(grammar.text, COMPILE_TIMEOUT_S), COMPILE_TIMEOUT_S)
        except TimeoutError:
            reason = f"it cannot be compiled within {COMPILE_TIMEOUT_S:g} s"
            raise InvalidRequestError(grammar.field, reason) from None

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is None or self._process.has_ended:
                self._process = await _Process.start(self._tokenizer)
            return self._process


class _Process:
    """`router.compiler_process`, while it runs. `problem` is the tokenizer's."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.problem = ""
        self._process = process
        self._writer = writer
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._reading = asyncio.ensure_future(self._read(reader))

    @classmethod
    async def start(cls, tokenizer: Tokenizer) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "router.compiler_process", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        started = cls(process, *await asyncio.open_connection(sock=ours))
        vocabulary = await asyncio.to_thread(lambda: json.dumps(tokenizer.as_json()).encode())
        started.problem = await started._answer(0, vocabulary)
        return started

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None or self._reading.done()

    async def ask(self, grammar: str, seconds: float) -> str:
        """What is wrong with the grammar; "": nothing. There is no answer after so many seconds."""
        number = next(self._numbers)
        return await self._answer(number, json.dumps([number, seconds, grammar]).encode())

    async def _answer(self, number: int, request: bytes) -> str:
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(request + b"\n")
            return await answer
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                number, problem = json.loads(line)
                if (answer := self._asked.get(number)) is not None and not answer.done():
                    answer.set_result(problem)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(unavailable("the process that compiles grammars has ended"))

    def close(self) -> None:
        """Once the event loop runs no more, or in it."""
        self._process.kill()
        self._process.wait()
