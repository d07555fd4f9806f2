"""The preprocessor answers or reports why not: limits, its death, and tasks that hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.grammars.structured_outputs import GrammarRequest
from router.openai_types import StructuredOutputs
from router.preprocessing import client
from router.preprocessing.client import MAX_AT_ONCE, GrammarCompiler, Preprocessor
from router.text.tokenizer import Tokenizer

PATTERNS = ",".join(f'{{"type":"string","pattern":"a.{{{count}}}b"}}' for count in range(1, 40))
ENDLESS = f'{{"allOf":[{PATTERNS}]}}'
"""A schema on which llguidance works without end, within all of its own limits."""


class Compiler:
    """A grammar compiler, and the errors of its tasks."""

    def __init__(self, folder: Path) -> None:
        self.failures: list[str] = []
        config = ServeConfig(model=str(folder))
        self.preprocessor = Preprocessor(config, Tokenizer.load(config), self.failures.append)
        self._number = 0

    @property
    def process(self) -> Any:
        return self.preprocessor._process

    @property
    def pid(self) -> int:
        return self.process._process.pid

    async def answer(self) -> str:
        """Compile a new grammar."""
        self._number += 1
        asked = GrammarRequest(structured_outputs=StructuredOutputs(choice=[f"choice {self._number}"]))
        return await GrammarCompiler(self.preprocessor).compile(asked.asked())

    async def answer_to_endless(self) -> str:
        from msgspec import Raw

        asked = GrammarRequest(structured_outputs=StructuredOutputs(json=Raw(ENDLESS.encode())))
        return await GrammarCompiler(self.preprocessor).compile(asked.asked())

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    async def has_begun(self) -> None:
        """Wait until a child has a task."""
        await eventually(lambda: len(self.children()) > len(self.process._idle))


@pytest.fixture(scope="module")
def made(model_folder: Path) -> Iterator[Compiler]:
    compiler = Compiler(model_folder)
    yield compiler
    compiler.preprocessor.close()


@pytest.fixture
def compiler(made: Compiler) -> Compiler:
    made.failures.clear()
    made.preprocessor._at_once = asyncio.Semaphore(MAX_AT_ONCE)  # each test has its own event loop
    return made


async def eventually(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_task_beyond_its_cpu_time_is_refused_and_ended(compiler, monkeypatch):
    monkeypatch.setattr("router.preprocessing.client.COMPILE_CPU_S", 0.1)
    asked = [compiler.answer_to_endless() for _ in range(MAX_AT_ONCE + 1)]
    for refused in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(refused, InvalidRequestError)
        assert (
            str(refused) == "structured_outputs: it takes more than 0.1 s of CPU time to compile, the limit"
        )
    assert compiler.failures == ["cpu_limit"] * (MAX_AT_ONCE + 1)
    assert await compiler.answer()
    await eventually(lambda: len(compiler.children()) <= MAX_AT_ONCE)


@pytest.mark.parametrize("depth", [600, 2600, 4000])
async def test_a_grammar_that_crashes_the_compiler_is_refused(compiler, depth):
    """Even if a worker's thread, with its larger stack, might just survive it."""
    rules = "\n".join(f"a{at}: a{at + 1}" for at in range(depth))
    grammar = f'start: a0\n{rules}\na{depth}: "x"'
    asked = GrammarRequest(structured_outputs=StructuredOutputs(grammar=grammar))
    with pytest.raises(
        InvalidRequestError, match=r"^structured_outputs: the compiler crashes on it \(SIGSEGV\)"
    ):
        await GrammarCompiler(compiler.preprocessor).compile(asked.asked())
    assert compiler.failures == ["crashed"]
    assert await compiler.answer()


async def test_a_busy_host_is_no_fault_of_the_request(compiler, monkeypatch):
    """It has not used its CPU time yet."""
    await compiler.answer()
    monkeypatch.setattr(client, "MIN_DEADLINE_S", 0.2 - 2 * 1000.0)
    monkeypatch.setattr("router.preprocessing.client.COMPILE_CPU_S", 1000.0)
    with pytest.raises(ApiError, match="the server is busy") as refused:
        await compiler.answer_to_endless()
    assert refused.value.status == 503
    assert refused.value.headers["retry-after"]
    assert compiler.failures == ["late"]


async def test_a_cancelled_call_ends_its_task(compiler, monkeypatch):
    monkeypatch.setattr("router.preprocessing.client.COMPILE_CPU_S", 1000.0)
    await compiler.answer()
    asked = asyncio.ensure_future(compiler.answer_to_endless())
    await compiler.has_begun()
    busy = set(compiler.children())
    assert await compiler.answer()  # meanwhile
    asked.cancel()
    await eventually(lambda: not busy <= set(compiler.children()))
    assert await compiler.answer()


async def test_a_task_survives_two_deaths_of_its_child(compiler, monkeypatch):
    monkeypatch.setattr("router.preprocessing.client.COMPILE_CPU_S", 1000.0)
    await compiler.answer()
    for child in compiler.children():
        os.kill(child, signal.SIGSTOP)
    asked = asyncio.ensure_future(compiler.answer())
    await compiler.has_begun()
    for child in compiler.children():
        os.kill(child, signal.SIGKILL)
    assert await asked
    assert compiler.failures == ["ended"]
    asked = asyncio.ensure_future(compiler.answer_to_endless())
    killed: set[int] = set()
    for _ in range(3):
        await compiler.has_begun()
        while killed >= set(compiler.children()):
            await asyncio.sleep(0.005)
        killed |= set(compiler.children())
        for child in compiler.children():
            os.kill(child, signal.SIGKILL)
    with pytest.raises(ApiError, match="has ended"):
        await asked
    assert compiler.failures == ["ended"] * 4


async def test_a_dead_process_is_replaced(compiler):
    await compiler.answer()
    before = compiler.process
    os.kill(compiler.pid, signal.SIGKILL)
    await eventually(lambda: before.has_ended)
    assert await compiler.answer()
    assert compiler.process is not before


async def test_tasks_survive_the_death_of_the_process_and_its_children(compiler):
    await compiler.answer()
    asked = [asyncio.ensure_future(compiler.answer()) for _ in range(2 * MAX_AT_ONCE)]
    await compiler.has_begun()
    os.killpg(compiler.pid, signal.SIGKILL)
    assert all(await asyncio.gather(*asked))


@pytest.mark.parametrize("has_idle", [True, False])
async def test_a_frozen_process_is_replaced(compiler, monkeypatch, caplog, has_idle):
    await compiler.answer()
    monkeypatch.setattr(client, "ACCEPT_TIMEOUT_S", 0.05)
    before = compiler.process
    if not has_idle:
        before._leave_idle()
    os.killpg(compiler.pid, signal.SIGSTOP)
    assert await compiler.answer()
    assert before.has_ended and compiler.process is not before
    assert compiler.failures == ["stuck"]
    assert "'grammar': stuck" in caplog.text


async def test_idle_children_that_died_are_passed_over(compiler):
    await asyncio.gather(*(compiler.answer() for _ in range(3)))
    for child in compiler.children():
        os.kill(child, signal.SIGKILL)
    await eventually(lambda: not compiler.children())
    assert await compiler.answer()
    assert compiler.failures == []


async def test_it_ends_with_the_router(compiler):
    await compiler.answer()
    process = compiler.process
    process._control.close()
    await eventually(lambda: process.has_ended)
