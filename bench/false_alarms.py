"""Whether busy workers on a busy machine are ever taken for dead.

    python -m bench.false_alarms [--seconds 150] [--concurrency 64] [--busy 4]

The bundled model serves as many requests at once as fill its batch, beside processes that do nothing but
compute. No worker dies in that time, so each loss is a false alarm. `steps` are those of all workers;
`hours` says how many hours of serving have as many, at 50 ms a step. `longest_silence_s` is what the router
saw of any worker, to be compared with `--worker-timeout`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.kills import total
from bench.own_server import serving

STEP_S = 0.05
LOOK_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1))
    options, serve_options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        with serving(serve_options, Path(folder)) as http:
            print(json.dumps(measure(http, options.seconds, options.concurrency, options.busy)))
        log = (Path(folder) / "tandem.log").read_text()
    for line in log.splitlines():
        if "is lost" in line or "speaks again" in line:
            print(line, file=sys.stderr)


def measure(http: httpx.Client, seconds: float, concurrency: int, busy: int) -> dict[str, float]:
    before = incarnations(http)
    steps_before = total(http, "tandem_engine_steps_total")
    over = threading.Event()
    longest = 0.0
    silent_looks = 0
    with busy_processes(busy), ThreadPoolExecutor(concurrency) as clients:
        running = [
            clients.submit(generate, str(http.base_url), number, over) for number in range(concurrency)
        ]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for worker in http.get("/workers").json()["workers"]:
                longest = max(longest, worker["silent_s"])
                silent_looks += worker["lifecycle"] == "silent"
            time.sleep(LOOK_S)
        steps = total(http, "tandem_engine_steps_total") - steps_before
        over.set()
        requests = sum(client.result() for client in running)
    return {
        "seconds": seconds,
        "requests": requests,
        "steps": steps,
        "hours": round(steps * STEP_S / 3600, 2),
        "longest_silence_s": longest,
        "silent_looks": silent_looks,
        "restarts": sum(before[name] != now for name, now in incarnations(http).items()),
    }


def generate(url: str, number: int, over: threading.Event) -> int:
    """One request after the other; returns how many were answered."""
    answered = 0
    with httpx.Client(base_url=url, timeout=300.0) as http:
        while not over.is_set():
            body = {
                "prompt": f"def f{number}_{answered}(x):\n",
                "max_tokens": 128,
            }
            http.post("/v1/completions", json=body | {"ignore_eos": True}).raise_for_status()
            answered += 1
    return answered


def incarnations(http: httpx.Client) -> dict[str, str]:
    return {worker["id"]: worker["incarnation"] for worker in http.get("/workers").json()["workers"]}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def compute() -> None:
    number = 1
    while True:
        number = number * 6364136223846793005 % 2**64


if __name__ == "__main__":
    main()
