"""`tandem bench kills`: checks that requests survive the death or freeze of processes with the same tokens,
and measures the pauses.

The bundled model serves streams from 2 prefill and 3 decode workers. At even intervals a random process is
killed, or frozen for good: a worker, or one of the server's helpers (`HELPERS`). With --router-replicas
sometimes a router is killed. Then the same requests run again without faults. `failed` counts requests
without an answer, `broken` requests whose router was killed, `different` requests whose tokens differ from
the second run. `pause_*` are gaps of over 0.1 s between two
events of a stream (or before its first) during which a fault came, by kind of fault. Each pause of over half
a second is printed with the faults of its time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from bench.servers import serving

WORKERS = ["--prefill-replicas", "2", "--decode-replicas", "3"]
KINDS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
HELPERS = {
    "actor": "ray::WorkerActor",
    "template": "-m deploy.template.server",
    "preprocessor": "-m router.preprocessing.process",
    "gcs": "/gcs_server",
    "raylet": "/raylet/raylet",
}
"""A part of each helper's command line, by the helper's name."""
HELPERS_SHARE = 0.3
LEAST_PAUSE_S = 0.1
LONG_PAUSE_S = 0.5
EARLIER_S = 5.0
"""[s] Time before a pause in which a fault may still be under way, such as a restart."""
RESTART_S = 60.0
CONCURRENCY = 32
STALE_S = 2.0
"""[s] Time after a router's death in which a client may still use its connection to it."""


@dataclass
class Fault:
    kind: str
    victim: str
    at: float


@dataclass
class WatchedAnswer:
    """An answer. `events`: times of the request and of each event; `router` is the index of the router that
    served it, -1 if it went to the shared port. `broke_at` is the time at which its connection broke.
    """

    router: int
    events: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    broke_at: float = 0.0


class Storm:
    def __init__(self, http: httpx.Client, replicas: int, rng: random.Random) -> None:
        self._http = http
        port = http.base_url.port or 80
        own = [f"http://127.0.0.1:{port + 1 + index}" for index in range(replicas)]
        self._urls = own if replicas > 1 else [str(http.base_url)]
        self._rng = rng
        self._faults: list[Fault] = []
        self._clock = time.time() - time.monotonic()

    def measure(self, requests: int, seconds: float, every: float) -> dict[str, Any]:
        before = self._workers()
        striker = threading.Thread(target=self._strike, args=(seconds, every))
        striker.start()
        struck = self._run(requests, seconds / requests)
        striker.join()
        restarted = self._all_back(before)
        counted = {
            name: total(self._http, f"tandem_{name}_total")
            for name in ("requests_placed_again", "requests_parked", "handoff_redirects", "handoff_takeovers")
        }
        whole = self._run(requests, 0.0)
        broken = [answer for answer in struck if answer.error and self._is_explained(answer)]
        failed = [answer for answer in struck if answer.error and not self._is_explained(answer)]
        for answer in failed:
            print(answer.error, file=sys.stderr)
        pairs = list(zip(struck, whole, strict=True))
        return {
            "requests": requests,
            "faults": len(self._faults),
            "victims": Counter(fault.victim for fault in self._faults),
            "failed": len(failed),
            "broken": len(broken),
            "failed_without_faults": sum(bool(answer.error) for answer in whole),
            "different": sum(not one.error and one.token_ids != other.token_ids for one, other in pairs),
            "restarted": restarted,
            **counted,
            **self._pauses(struck),
        }

    # --- requests ---------------------------------------------------------------------------------

    def _run(self, requests: int, interval: float) -> list[WatchedAnswer]:
        """Send a request every `interval` seconds, or later if all clients are busy."""
        start = time.monotonic()

        def ask(number: int) -> WatchedAnswer:
            time.sleep(max(0.0, start + number * interval - time.monotonic()))
            return self._ask(number)

        with ThreadPoolExecutor(CONCURRENCY) as clients:
            return list(clients.map(ask, range(requests)))

    def _ask(self, number: int) -> WatchedAnswer:
        rng = random.Random(number)
        body = {
            "prompt": [rng.randrange(1, 1000) for _ in range(rng.randrange(8, 200))],
            "max_tokens": rng.randrange(50, 400),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        answer = WatchedAnswer(number % len(self._urls), [time.monotonic()])
        try:
            if not self._takes_requests(answer.router):
                answer.router = -1
            url = self._urls[answer.router] if answer.router >= 0 else str(self._http.base_url)
            self._stream(url, body, answer)
        except httpx.HTTPError as error:
            answer.error, answer.broke_at = f"{type(error).__name__}: {error}", time.monotonic()
        return answer

    def _takes_requests(self, router: int) -> bool:
        """Return whether the router is ready. (While it starts, the shared port leads to another router.)"""
        try:
            return len(self._urls) == 1 or self._http.get(f"{self._urls[router]}/ready").is_success
        except httpx.TransportError:
            return False

    def _stream(self, url: str, body: dict[str, Any], answer: WatchedAnswer) -> None:
        with self._http.stream("POST", f"{url.rstrip('/')}/v1/completions", json=body) as response:
            if not response.is_success:
                answer.error = f"{response.status_code}: {response.read()[:300]!r}"
                return
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer.events.append(time.monotonic())
                    event = json.loads(line[6:])
                    if "choices" in event:
                        answer.token_ids += event["choices"][0]["token_ids"]
                    else:
                        answer.error = line[:300]

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self, seconds: float, every: float) -> None:
        for _ in range(int(seconds / every) - 1):
            time.sleep(every)
            kind, victim, pid = self._choose()
            self._faults.append(Fault(kind, victim, time.monotonic()))
            os.kill(pid, KINDS[kind])

    def _choose(self) -> tuple[str, str, int]:
        """Choose a random ready worker, a helper or, if there are several routers, a router."""
        if self._rng.random() < HELPERS_SHARE:
            name, pids = self._rng.choice(list(self._helpers().items()))
            if pids:
                return self._rng.choice(list(KINDS)), name, self._rng.choice(pids)
        if len(self._urls) > 1 and self._rng.random() < 1 / 6:
            router = self._rng.choice(self._routers())
            return "killed", router["id"], router["pid"]
        while not (ready := [w for w in self._workers() if w["lifecycle"] == "ready"]):
            time.sleep(0.1)
        worker = self._rng.choice(ready)
        return self._rng.choice(list(KINDS)), worker["id"], worker["pid"]

    def _helpers(self) -> dict[str, list[int]]:
        """Return the process ids of the server's helpers, without the processes that they have forked."""
        router = psutil.Process(self._routers()[0]["pid"])
        server = router if len(self._urls) == 1 else router.parent() or router
        commands, parents = {}, {}
        for child in server.children(recursive=True):
            with suppress(psutil.Error):
                commands[child.pid], parents[child.pid] = " ".join(child.cmdline()[:3]), child.ppid()
        return {
            name: [
                pid
                for pid, command in commands.items()
                if part in command and part not in commands.get(parents[pid], "")
            ]
            for name, part in HELPERS.items()
        }

    def _routers(self) -> list[dict[str, Any]]:
        found = []
        for url in self._urls:
            try:
                found.append(self._http.get(f"{url}/workers").json()["router"])
            except httpx.TransportError:
                continue
        return found

    def _workers(self) -> list[dict[str, Any]]:
        while True:
            try:
                workers: list[dict[str, Any]] = self._http.get("/workers").json()["workers"]
            except httpx.TransportError:  # the connection's router was killed
                continue
            return workers

    def _all_back(self, before: list[dict[str, Any]]) -> bool:
        deadline = time.monotonic() + RESTART_S
        expected = {worker["id"] for worker in before}
        while time.monotonic() < deadline:
            if {w["id"] for w in self._workers() if w["lifecycle"] == "ready"} == expected:
                return len(self._routers()) == len(self._urls) or len(self._urls) == 1
            time.sleep(0.2)
        return False

    # --- results ----------------------------------------------------------------------------------

    def _is_explained(self, answer: WatchedAnswer) -> bool:
        """Return whether the request's router was killed during the request, or shortly before, since clients
        keep connections.
        """
        routers = [f"router-{answer.router}"] if answer.router >= 0 else [f.victim for f in self._faults]
        deaths = [fault.at for fault in self._faults if fault.victim in routers and "router" in fault.victim]
        return any(answer.events[0] - STALE_S <= at <= answer.broke_at for at in deaths)

    def _pauses(self, answers: list[WatchedAnswer]) -> dict[str, float]:
        seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for answer in answers:
            for begin, end in zip(answer.events, answer.events[1:], strict=False):
                kinds = {fault.kind for fault in self._faults if begin <= fault.at <= end}
                if end - begin > LEAST_PAUSE_S and kinds:
                    seen["frozen" if "frozen" in kinds else "killed"].append(end - begin)
                if end - begin > LONG_PAUSE_S:
                    self._show(answer, begin, end)
        figures: dict[str, float] = {}
        for kind, pauses in seen.items():
            figures[f"pauses_{kind}"] = len(pauses)
            for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
                figures[f"pause_{kind}_{name}_s"] = (
                    round(float(np.quantile(pauses, share)), 3) if pauses else 0.0
                )
        return figures

    def _show(self, answer: WatchedAnswer, begin: float, end: float) -> None:
        """Print a long pause with the faults during it and shortly before, by their time from its begin."""
        faults = [
            f"{fault.victim} {fault.kind} at {fault.at - begin:+.1f} s"
            for fault in self._faults
            if begin - EARLIER_S <= fault.at <= end
        ]
        place, clock = answer.events.index(begin), time.strftime("%X", time.localtime(self._clock + begin))
        what = ", ".join(faults) or "no fault"
        print(f"{clock} pause of {end - begin:.2f} s before event {place}: {what}", file=sys.stderr)


def total(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def main(
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=1)] = 600,
    seconds: Annotated[float, typer.Option(min=1.0, help="in which the requests come")] = 120.0,
    every: Annotated[float, typer.Option(min=0.1, help="seconds from one fault to the next")] = 4.0,
    seed: Annotated[int, typer.Option(help="of the faults")] = 0,
    router_replicas: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Kill and freeze workers under load, and compare all tokens with a run without faults. Further options
    are those of `tandem serve`.
    """
    options = [*WORKERS, "--router-replicas", str(router_replicas), *context.args]
    with serving(options) as http:
        storm = Storm(http, router_replicas, random.Random(seed))
        print(json.dumps(storm.measure(requests, seconds, every)))
