"""What a client sees when its worker leaves: the longest pause of its stream, and the same tokens.

    python -m bench.drains [--streams 4] [--drains 10]

The bundled model serves from 1 prefill and 2 decode workers. Streams run without an end while the decode
workers are told to end in turn (SIGTERM), each as soon as the other is back. Then the same requests run again
without that. `pause_*` are the longest gaps between two events of each stream.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.kills import total
from bench.own_server import serving

TOKENS = 900
"""Of an answer: nearly all that the bundled model's context has room for."""
WORKERS = ["--prefill-replicas", "1", "--decode-replicas", "2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--drains", type=int, default=10)
    options, serve_options = parser.parse_known_args()
    with serving([*WORKERS, *serve_options]) as http:
        print(json.dumps(measure(http, options.streams, options.drains)))


def measure(http: httpx.Client, streams: int, drains: int) -> dict[str, float]:
    done = threading.Event()
    drainer = threading.Thread(target=drain_all, args=(http, drains, done))
    drainer.start()
    moved = run(http, streams, done)
    drainer.join()
    migrated = total(http, "tandem_requests_migrated_total")
    left = run(http, streams, done, len(moved))
    return {
        "drains": drains,
        "requests": len(moved),
        "migrated": migrated,
        "placed_anew": total(http, "tandem_requests_placed_anew_total"),
        "different": sum(a[0] != b[0] for a, b in zip(moved, left, strict=True)),
        **{f"pause_{name}_s": round(value, 4) for name, value in pauses(moved).items()},
        **{f"pause_without_{name}_s": round(value, 4) for name, value in pauses(left).items()},
    }


def pauses(answers: list[tuple[list[int], float]]) -> dict[str, float]:
    longest = sorted(pause for _, pause in answers)
    return {"median": statistics.median(longest), "longest": longest[-1]}


def run(
    http: httpx.Client, streams: int, done: threading.Event, count: int | None = None
) -> list[tuple[list[int], float]]:
    """Tokens and longest pause of each request: of `count`, or of those that began before `done`."""
    numbers = iter(range(10**9 if count is None else count))
    answers: dict[int, tuple[list[int], float]] = {}

    def client() -> None:
        for number in numbers:
            answers[number] = ask(http, number)
            if count is None and done.is_set():
                return

    with ThreadPoolExecutor(streams) as pool:
        for future in [pool.submit(client) for _ in range(streams)]:
            future.result()
    return [answers[number] for number in sorted(answers)]


def ask(http: httpx.Client, number: int) -> tuple[list[int], float]:
    rng = random.Random(number)
    body: dict[str, Any] = {
        "prompt": [rng.randrange(1, 1000) for _ in range(rng.randrange(8, 100))],
        "max_tokens": TOKENS,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    longest, last = 0.0, 0.0
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if tokens:
                    longest = max(longest, now - last)
                last = now
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    return tokens, longest


def drain_all(http: httpx.Client, drains: int, done: threading.Event) -> None:
    for number in range(drains):
        decodes = [w for w in http.get("/workers").json()["workers"] if w["role"] == "decode"]
        while len(decodes) < 2:
            time.sleep(0.1)
            decodes = [w for w in http.get("/workers").json()["workers"] if w["role"] == "decode"]
        time.sleep(0.3)
        worker = sorted(decodes, key=lambda w: str(w["id"]))[number % 2]
        os.kill(worker["pid"], signal.SIGTERM)
        while worker["incarnation"] in {w["incarnation"] for w in http.get("/workers").json()["workers"]}:
            time.sleep(0.05)
    done.set()


if __name__ == "__main__":
    main()
