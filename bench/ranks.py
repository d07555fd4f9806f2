"""What tensor parallelism costs or brings on one host: an engine of one process beside one of several ranks.

    python -m bench.ranks [--model tandem-code-10m] [--dtype auto] [--size 2] [--threads 2] [--rounds 9]

Both have the same cores: `--threads` in one process, or divided among the ranks. They run in turn. Prints the
medians of a decode step's time and of a prompt's, and the median of the rounds' ratios. Above 1 ranks are
faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from bench.record import made_by
from engine.engine import Engine
from engine.parallel.follower import follow
from engine.parallel.group import Ranks
from engine.parallel.leader import Leader
from engine.select_forward import runner_of_one_process
from kvtransfer.blocks.memory import PoolMemory
from models.bundled import bundled_path
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

END_S = 30.0
"""An engine's process ends within so many seconds of being told."""
STEPS = 48
WORK = {"decode, 1 row": (1, 16), "decode, 16 rows": (16, 16), "prompt, 480 tokens": (1, 480)}
"""Sequences, and the tokens of their prompts."""


def be_engine(config: ServeConfig, size: int, pipe: Connection) -> None:
    """Run a round whenever told, and send its times in seconds."""

    def be_rank(ranks: Ranks, link: socket.socket) -> None:
        torch.set_num_threads(config.worker_threads or 1)
        follow(config, ranks, link)

    leader = Leader(size, be_rank) if size > 1 else None
    torch.set_num_threads(config.worker_threads or 1)

    def allocate(nbytes: int) -> memoryview:
        lend = None if leader is None else lambda fd: leader.lend(fd, config.start_timeout)
        return PoolMemory(nbytes, lend=lend).buffer

    make_runner = leader.runner if leader is not None else runner_of_one_process
    engine = Engine(config, allocate=allocate, make_runner=make_runner)
    pipe.send(engine.start_up["forward"])
    while pipe.recv():
        pipe.send([seconds(engine, *work) for work in WORK.values()])
    engine.close()
    if leader is not None:
        leader.close()


def seconds(engine: Engine, sequences: int, length: int) -> float:
    """Of the prompts' step if they are long, else of a step that decodes them."""
    is_prompt = length > STEPS
    for index in range(sequences):
        prompt = [1 + (index + place) % 97 for place in range(length)]
        params = SamplingParams(max_tokens=1 if is_prompt else STEPS, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    if not is_prompt:
        engine.step()
    started, steps = time.perf_counter(), 0
    while engine.has_work():
        engine.step()
        steps += 1
    return (time.perf_counter() - started) / steps


def report(times: Sequence[Sequence[list[float]]]) -> None:
    """`times` of one process and of the ranks, [2][rounds][kinds of work]."""
    print(f"{'':<20}{'one, ms':>9}{'ranks, ms':>11}{'ratio':>7}")
    for index, name in enumerate(WORK):
        one, ranks = ([each[index] for each in rounds] for rounds in times)
        ratio = statistics.median(a / b for a, b in zip(one, ranks, strict=True))
        print(
            f"{name:<20}{statistics.median(one) * 1e3:9.2f}{statistics.median(ranks) * 1e3:11.2f}{ratio:7.2f}"
        )


class Side:
    """An engine of so many ranks, in a process of its own. Ends the program where that ends by itself."""

    def __init__(self, size: int, arguments: argparse.Namespace) -> None:
        config = ServeConfig(
            model=bundled_path(arguments.model),
            dtype=arguments.dtype,
            device="cpu",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=256 << 20,
            worker_threads=max(1, arguments.threads // size),
        )
        self._size = size
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=be_engine, args=(config, size, theirs), daemon=True)
        self._process.start()
        theirs.close()
        print(f"{size}: {self._answer()}, {config.worker_threads} threads each", flush=True)

    def seconds(self) -> list[float]:
        """Of each kind of work, in one more round."""
        self._pipe.send(True)
        answer: list[float] = self._answer()
        return answer

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(END_S)
        if self._process.exitcode != 0:
            self._fail()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(END_S)
            self._fail()

    def _fail(self) -> NoReturn:
        code = self._process.exitcode
        how = f"does not end within {END_S:g} s" if code is None else f"ended with exit code {code}"
        raise SystemExit(f"bench.ranks: the engine of size {self._size} {how}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares one process with tensor-parallel ranks.")
    parser.add_argument("--model", default="tandem-code-10m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of one process; the ranks divide them")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    sides = [Side(size, arguments) for size in (1, arguments.size)]
    times: list[list[list[float]]] = [[], []]
    for _ in range(arguments.rounds):
        for side, rounds in zip(sides, times, strict=True):
            rounds.append(side.seconds())
    report(times)
    options = (f"--{name} {getattr(arguments, name)}" for name in ("model", "dtype", "size", "threads"))
    print(made_by(f"python -m bench.ranks {' '.join(options)}"))
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
