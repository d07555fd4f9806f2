"""Runs a whole engine on several ranks, in a process that forks them as `multiprocessing` starts it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from engine.engine import Engine
from engine.lora.config import AdapterError
from engine.lora.files import RawAdapter
from engine.parallel import messages
from engine.parallel.follower import follow
from engine.parallel.group import GATHER_TIMEOUT_S, DistributedRanks, LostRankError, Meeting, Ranks
from engine.parallel.leader import Join, Leader, _follow, join_by
from engine.parallel.messages import AdapterKept, KeepAdapter, RankCall, receive
from kvtransfer.blocks.memory import PoolMemory
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from speculation.speculator import BatchSpeculator

ANSWER_S = 60.0


def in_child(work: Callable[..., None], *arguments: Any) -> Any:
    """Start work in a process of one thread. Return the pipe's end that gets its answer."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    context.Process(target=work, args=(*arguments, theirs), daemon=True).start()
    theirs.close()
    return ours


def answer(pipe: Any) -> Any:
    assert pipe.poll(ANSWER_S)
    return pipe.recv()


def join_of(kind: str, size: int) -> Join:
    """Return how ranks on this CPU join in "shared memory", or by "gloo" as GPUs do by NCCL."""
    if kind == "shared memory":
        return join_by("cpu", size)
    meeting = Meeting()
    return lambda rank: DistributedRanks(size, rank, meeting, torch.device("cpu"))


def run(config: dict[str, Any], size: int, kind: str, requests: list[bytes], pipe: Connection) -> None:
    """Send the engine's description and each request's tokens with their log-probabilities and numbers of
    drafted and accepted ones, and the counters; or why it cannot start.
    """
    checked = msgspec.convert(config, ServeConfig)

    def be_rank(ranks: Ranks, link: socket.socket) -> None:
        torch.set_num_threads(1)
        follow(checked, ranks, link)

    leader = Leader(size, be_rank, join_of(kind, size)) if size > 1 else None
    torch.set_num_threads(1)

    def allocate(nbytes: int) -> memoryview:
        lend = None if leader is None else lambda fd: leader.lend(fd, 30.0)
        return PoolMemory(nbytes, lend=lend).buffer

    try:
        speculate = None if checked.speculative_config is None else BatchSpeculator
        engine = Engine(checked, allocate=allocate, speculate=speculate, leader=leader)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    results: dict[str, list[Any]] = {}
    for data in requests:
        request = msgspec.msgpack.decode(data, type=EngineRequest)
        engine.add(request)
        results[request.request_id] = []
        if request.cache_salt:  # alone, before the others
            _finish(engine, results)
    _finish(engine, results)
    pipe.send((engine.start_up["forward"], results, engine.counters()))
    engine.close()
    if leader is not None:
        leader.close()


def lose_a_rank_in_a_gather(kind: str, pipe: Connection) -> None:
    """Send a gather's error, the seconds that it took and whether `on_lost` was called: within it a rank of
    three is killed.
    """

    def be_rank(ranks: Ranks, link: socket.socket) -> None:
        for _ in range(2 if ranks.rank == 1 else 1):
            ranks.gather(torch.ones(1, 1), ranks.columns(3))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    leader, lost = Leader(3, be_rank, join_of(kind, 3)), threading.Event()
    leader.on_lost = lost.set
    leader.watch()
    leader.ranks.gather(torch.ones(1, 1), leader.ranks.columns(3))
    began = time.monotonic()
    try:
        leader.ranks.gather(torch.ones(1, 1), leader.ranks.columns(3))
    except LostRankError as error:
        seconds = time.monotonic() - began
        pipe.send((str(error).partition(":")[0], seconds, lost.wait(GATHER_TIMEOUT_S / 2)))
    leader.close()


def refuse_an_adapter(pipe: Connection) -> None:
    """Send why not all of three ranks have the adapter, and which ranks are told to drop which slot."""
    dropped = multiprocessing.SimpleQueue()

    def be_rank(ranks: Ranks, link: socket.socket) -> None:
        message = receive(link, messages.to_others)
        assert isinstance(message, KeepAdapter)
        error = "rank 2 cannot read it" if ranks.rank == 2 else ""
        messages.send(link, messages.encode(AdapterKept(error)))
        message = receive(link, messages.to_others)
        assert message == RankCall("drop_adapter", [7])
        dropped.put(ranks.rank)

    leader, refusal = Leader(3, be_rank), ""
    try:
        leader.keep(7, "/adapters/sql", RawAdapter(b"", b""))
    except AdapterError as error:
        refusal = str(error)
    pipe.send((refusal, [dropped.get(), dropped.get()]))
    leader.close()


def lead_a_deaf_rank(pipe: Connection) -> None:
    """Send the process ids of this leader and of its rank, which ignores it, then wait to be killed."""

    def be_rank(ranks: Ranks, link: socket.socket) -> None:
        pipe.send((os.getppid(), os.getpid()))
        signal.pause()

    leader = Leader(2, be_rank)
    pipe.close()
    signal.pause()
    leader.close()


def follow_nobody(pipe: Connection) -> None:
    """Be a rank whose leader has ended before the rank could ask to end with it. Sends nothing."""
    ours, _ = socket.socketpair()
    _follow(lambda *_: pipe.send("it follows"), os.getpid(), join_by("cpu", 2), 1, ours)


def _finish(engine: Engine, results: dict[str, list[Any]]) -> None:
    while engine.has_work():
        for output in engine.step().outputs:
            logprobs = msgspec.to_builtins(output.logprobs)
            details = logprobs, output.drafted_tokens, output.accepted_tokens
            results[output.request_id] += [output.token_ids, details]
