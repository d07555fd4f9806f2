"""Whether requests survive the death of every worker, with the same tokens.

    python -m bench.kills [--requests 2000] [--concurrency 8] [--seconds 60]

The bundled model serves from 2 prefill and 3 decode workers while each of the five is killed once, at even
intervals. Then the same requests run again without kills. `failed` counts those without an answer, and
`different` those whose tokens are not those of the second run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.peers.process import Command, RunningSystem
from bench.peers.systems import free_port

WORKERS = ["--prefill-replicas", "2", "--decode-replicas", "3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    options, serve_options = parser.parse_known_args()
    with serving([*WORKERS, *serve_options]) as http:
        print(json.dumps(measure(http, options.requests, options.concurrency, options.seconds)))


@contextmanager
def serving(serve_options: Sequence[str]) -> Iterator[httpx.Client]:
    """The bundled model's server with these options, once every worker is there."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "deploy", "serve", "--port", str(port), *serve_options]
    with tempfile.TemporaryDirectory() as folder:
        server = RunningSystem([Command("tandem", argv, f"{url}/ready")], Path(folder), 300.0)
        with server, httpx.Client(base_url=url, timeout=300.0) as http:
            while "Listening on" not in (Path(folder) / "tandem.log").read_text():
                time.sleep(0.2)
            yield http


def measure(http: httpx.Client, requests: int, concurrency: int, seconds: float) -> dict[str, float]:
    """Run the requests with kills, spread over so many seconds, and then without."""
    interval = seconds / requests
    killer = threading.Thread(target=kill_all, args=(http, seconds))
    killer.start()
    struck = run(http, requests, concurrency, interval)
    killer.join()
    whole = run(http, requests, concurrency, 0.0)
    reasons = sorted({answer for answer in (*struck, *whole) if isinstance(answer, str)})
    for reason in reasons:
        print(reason, file=sys.stderr)
    pairs = list(zip(struck, whole, strict=True))
    return {
        "requests": requests,
        "failed": sum(isinstance(answer, str) for answer in struck),
        "failed_without_kills": sum(isinstance(answer, str) for answer in whole),
        "different": sum(not isinstance(one, str) and one != other for one, other in pairs),
        "placed_anew": total(http, "tandem_requests_placed_anew_total"),
        "parked": total(http, "tandem_requests_parked_total"),
        "redirected": total(http, "tandem_handoff_redirects_total"),
    }


def run(http: httpx.Client, requests: int, concurrency: int, interval: float) -> list[list[int] | str]:
    """Each request's tokens, or why it failed. One starts every `interval` seconds, if a client is free."""
    start = time.monotonic()

    def ask(number: int) -> list[int] | str:
        time.sleep(max(0.0, start + number * interval - time.monotonic()))
        rng = random.Random(number)
        body = {
            "prompt": [rng.randrange(1, 1000) for _ in range(rng.randrange(8, 200))],
            "max_tokens": rng.randrange(8, 64),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = http.post("/v1/completions", json=body)
        if not answer.is_success:
            return f"{answer.status_code}: {answer.text[:300]}"
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(concurrency) as clients:
        return list(clients.map(ask, range(requests)))


def kill_all(http: httpx.Client, seconds: float) -> None:
    workers = http.get("/workers").json()["workers"]
    for worker in workers:
        time.sleep(seconds / (len(workers) + 1))
        os.kill(worker["pid"], signal.SIGKILL)


def total(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


if __name__ == "__main__":
    main()
