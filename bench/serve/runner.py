"""The run of a load against a target: arrivals, concurrency, warm-up, progress."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from bench.serve.client import Client, Record, ServerTarget
from bench.serve.statistics import Summary, summarize
from bench.serve.workload import LoadRequest
from deploy.processes import OTHER_FILES
from native.process import raise_file_limit

T = TypeVar("T")


class RunResult(msgspec.Struct, frozen=True):
    """A run's figures, and the CPU seconds of the load generator itself."""

    summary: Summary
    client_cpu: float
    samples: dict[str, str]
    """A message for each kind of error."""


async def drive(
    client: Client,
    requests: Sequence[LoadRequest],
    max_concurrency: int | None = None,
    on_done: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Send `requests` at their arrival times, at most `max_concurrency` at once. Records come in order.

    A request's clock starts when it is sent, so time spent waiting for a free place is not counted.
    """
    at_once = min(max_concurrency or len(requests), len(requests))
    raise_file_limit(at_once + OTHER_FILES)
    records = [Record()] * len(requests)
    begin = time.perf_counter()
    pending = iter(enumerate(requests))

    async def worker() -> None:
        for index, request in pending:
            if request.arrival is not None:
                await asyncio.sleep(begin + request.arrival - time.perf_counter())
            records[index] = await client.send(request)
            if on_done is not None:
                on_done(records[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return records


def run_on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, on uvloop if installed, which takes a quarter less CPU time per token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def run_load(
    target: ServerTarget,
    requests: Sequence[LoadRequest],
    max_concurrency: int | None = None,
    objectives: dict[str, float] | None = None,
    warmups: Sequence[LoadRequest] = (),
    on_done: Callable[[Record], None] | None = None,
) -> RunResult:
    """Warm up, then measure one load.

    Raises RuntimeError if a warm-up request fails.
    """

    async def measure() -> tuple[list[Record], float]:
        client = Client(target)
        for record in await drive(client, warmups):
            if record.error:
                raise RuntimeError(f"the server does not answer: {record.error}: {record.detail}")
        gc.collect()
        gc.freeze()
        before = time.process_time()
        records = await drive(client, requests, max_concurrency, on_done)
        return records, time.process_time() - before

    records, client_cpu = run_on_fast_loop(measure())
    samples = {record.error: record.detail for record in records if record.error}
    return RunResult(summarize(records, objectives), client_cpu, samples)
