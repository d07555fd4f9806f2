"""`tandem bench soak`: checks for right answers without memory growth during an operator's day, compressed
into minutes.

The bundled model serves short completions at an even rate. Meanwhile a worker is killed, a decode worker
changes its role and back, all workers restart in turn, and a decode worker is added and one removed, again
and again. `failed` counts requests without an answer, `wrong` requests whose text differs from the same
request's text before these events. `growth` is the growth in per cent, after the first third, of the memory
that each surviving process has written to (few workers are among them, because workers restart all the time).
Last, `--streams` streams are held open at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from bench.servers import serving

DECODE_WORKERS = 2
WORKERS = ["--prefill-replicas", "2", "--decode-replicas", str(DECODE_WORKERS)]
KINDS = 40
"""Number of different requests. Each is repeated many times, so its right text is known."""
SHORT, LONG = 24, 48
EVENT_PAUSE_S = 5.0
SAMPLE_S = 1.0
MIB = 2**20


def body(kind: int, tokens: int) -> dict[str, object]:
    return {
        "model": "tandem-code-10m",
        "prompt": f"def function_{kind}(path):\n    # reads {kind} lines\n",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": kind,
        "ignore_eos": True,
    }


def written_bytes(pid: int) -> int:
    """Return the memory that the process itself has written to. Pages of programs and libraries are left
    out: the kernel loads and drops them, and other processes share them.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return (kib["Anonymous"] + kib["Swap"]) * 1024


@dataclass
class Soak:
    url: str
    expected: dict[tuple[int, int], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    memory: defaultdict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Samples of each process: time, and bytes that it had written to."""

    async def measure(self, rate: float, seconds: float, streams: int) -> dict[str, object]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            self._client = client
            for kind in range(KINDS):
                for tokens in (SHORT, LONG):
                    self.expected[kind, tokens] = await self._text(kind, tokens)
            storm = asyncio.create_task(self._operate())
            sampler = asyncio.create_task(self._sample())
            began = time.monotonic()
            await self._load(rate, seconds)
            storm.cancel()
            sampler.cancel()
            for ended in await asyncio.gather(storm, sampler, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
            growth = self._growth(began + seconds / 3, began + seconds - 2 * SAMPLE_S)
            held = await self._hold(streams)
        return {
            "seconds": seconds,
            **self.counts,
            "events": dict(self.events),
            "growth": growth,
            "held": held,
        }

    # --- requests ---------------------------------------------------------------------------------

    async def _load(self, rate: float, seconds: float) -> None:
        began, running = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(began + number / rate - time.monotonic(), 0.0))
            running.append(asyncio.create_task(self._ask(number % KINDS)))
        await asyncio.gather(*running)

    async def _ask(self, kind: int) -> None:
        self.counts["requests"] += 1
        try:
            text = await self._text(kind, SHORT)
        except (httpx.HTTPError, KeyError) as error:
            self.counts["failed"] += 1
            print(f"failed: {error!r}", file=sys.stderr)
        else:
            self.counts["wrong"] += text != self.expected[kind, SHORT]

    async def _text(self, kind: int, tokens: int) -> str:
        answer = await self._client.post("/v1/completions", json=body(kind, tokens))
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    async def _hold(self, streams: int) -> dict[str, object]:
        """Hold `streams` streams open at once: each begins before the first one ends."""
        began, open_now, most = time.monotonic(), 0, 0
        counts: Counter[str] = Counter()

        async def follow(kind: int) -> None:
            nonlocal open_now, most
            text = ""
            open_now += 1
            most = max(most, open_now)
            try:
                request = self._client.stream(
                    "POST", "/v1/completions", json=body(kind, LONG) | {"stream": True}
                )
                async with request as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
            except (httpx.HTTPError, KeyError) as error:
                counts["failed"] += 1
                print(f"failed: {error!r}", file=sys.stderr)
            else:
                counts["wrong"] += text != self.expected[kind, LONG]
            open_now -= 1

        await asyncio.gather(*(follow(number % KINDS) for number in range(streams)))
        return {"streams": streams, "most_at_once": most, "seconds": time.monotonic() - began, **counts}

    # --- faults and changes -----------------------------------------------------------------------

    async def _operate(self) -> None:
        for turn in itertools.count():
            await asyncio.sleep(EVENT_PAUSE_S)
            workers = await self._workers()
            gone = ""
            match turn % 4:
                case 0:
                    victim = sorted(workers)[turn % len(workers)]
                    os.kill(workers[victim], signal.SIGKILL)
                    gone = victim
                    self.events["kills"] += 1
                case 1:
                    changed = max(worker_id for worker_id in workers if "decode" in worker_id)
                    for role in ("prefill", "decode"):
                        await self._ask_for("role changes", f"/workers/{changed}/role", {"role": role})
                case 2:
                    await self._ask_for("restarts", "/restart", {})
                case 3:
                    for count in (DECODE_WORKERS + 1, DECODE_WORKERS):
                        await self._ask_for("scalings", "/scale", {"decode": count})
            while gone and (await self._workers()).get(gone, workers[gone]) == workers[gone]:
                await asyncio.sleep(0.1)

    async def _ask_for(self, name: str, path: str, body: dict[str, object]) -> None:
        answer = await self._client.post(path, json=body)
        self.events[name if answer.status_code == 200 else f"{name}: {answer.text}"] += 1
        await asyncio.sleep(1.0)

    async def _workers(self) -> dict[str, int]:
        answer = (await self._client.get("/workers")).json()["workers"]
        return {worker["id"]: worker["pid"] for worker in answer if worker["lifecycle"] == "ready"}

    # --- memory -----------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            for process in psutil.Process().children(recursive=True):
                try:
                    sample = time.monotonic(), written_bytes(process.pid)
                    self.memory[f"{process.name()} {process.pid}"].append(sample)
                except (psutil.Error, OSError):
                    continue
            await asyncio.sleep(SAMPLE_S)

    def _growth(self, since: float, until: float) -> dict[str, str]:
        growth = {}
        for process, samples in self.memory.items():
            later = [size for at, size in samples if at >= since]
            if samples[0][0] < since and samples[-1][0] >= until:
                percent = 100.0 * (later[-1] / later[0] - 1)
                growth[process] = f"{percent:+.1f} % to {later[-1] / MIB:.0f} MiB"
        return growth


def main(
    context: typer.Context,
    rate: Annotated[float, typer.Option(min=0.1, help="requests a second")] = 24.0,
    seconds: Annotated[float, typer.Option(min=6.0)] = 600.0,
    streams: Annotated[int, typer.Option(min=0, help="held open at once in the end")] = 1000,
) -> None:
    """Run an operator's day in minutes, and check answers and memory. Further options are those of `tandem
    serve`.
    """
    with serving([*WORKERS, *context.args]) as http:
        soak = Soak(str(http.base_url))
        print(json.dumps(asyncio.run(soak.measure(rate, seconds, streams))))
