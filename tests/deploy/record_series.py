"""Records the series of a server's `/metrics`: python -m tests.deploy.record_series (two minutes)

The server has workers of all roles and both tiers, is loaded, loses a worker, refuses requests and drains.
`recorded_series.txt` then has each series once, without its value. Dashboards and alerts are tested on them.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from models.bundled import BUNDLED_MODEL
from tests.deploy.server_process import ServerProcess

TARGET = Path(__file__).with_name("recorded_series.txt")
OPTIONS = (
    *("--decode-replicas", "2", "--draft-replicas", "1", "--max-queued-requests", "24"),
    *("--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 3}'),
    *("--kv-offloading-size", "0.01", "--kv-disk-size", "0.05", "--slo-ttft", "60"),
)
TEXT = (Path(__file__).read_text() * 2).splitlines(keepends=True)


def recorded() -> list[str]:
    """Return the recorded series as `name{label="value", ...}`."""
    return TARGET.read_text().splitlines()


@contextlib.contextmanager
def server(*options: str) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "disk").mkdir(mode=0o700)
        disk = ["--kv-disk-path", f"{folder}/disk", "--enable-log-requests"]
        with ServerProcess(BUNDLED_MODEL, Path(folder) / "log", *OPTIONS, *disk, *options) as running:
            yield running.wait_ready()


def exercise(running: ServerProcess) -> None:
    """Make everything happen that dashboards show on an ordinary day."""
    url, worker = running.url, "decode-1"

    def ask(number: int, **fields: Any) -> int:
        prompt = "".join(TEXT[number % 7 : number % 7 + 5 + number % 40])
        body = {"model": "tandem-code-10m", "prompt": prompt, "max_tokens": 24, **fields}
        try:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code
        except httpx.ReadTimeout:
            return 499

    methods = ("ngram", "draft_model")
    with ThreadPoolExecutor(40) as pool:
        for _ in range(2):
            list(pool.map(ask, range(40)))
        list(pool.map(lambda n: ask(n, speculative={"method": methods[n % 2]}), range(40)))
        places = ("none", "local", "remote")
        list(pool.map(lambda n: ask(n, speculative={"place": places[n % 3]}, temperature=0), range(40)))
        long = [pool.submit(ask, n, max_tokens=300) for n in range(12)]
        running.wait(lambda: running.workers()[worker]["num_running"] > 0, 60)
        httpx.post(f"{url}/v1/completions", json={"prompt": 5, "max_tokens": -1}, timeout=10)
        (pid,) = [running.worker_pid(worker)]
        running.look()
        next(p for p in running.seen.values() if p.pid == pid).send_signal(signal.SIGKILL)
        assert {each.result() for each in long} <= {200, 429}
        running.wait(lambda: running.workers().get(worker, {}).get("lifecycle") == "ready", 60)
        long = [pool.submit(ask, n, max_tokens=300) for n in range(12)]
        running.wait(lambda: running.workers()[worker]["num_running"] > 0, 60)
        httpx.post(f"{url}/workers/{worker}/drain", timeout=60)
        assert {each.result() for each in long} <= {200, 429}


def series(text: str) -> list[str]:
    """Return the series of `/metrics` without values: of one worker, with two buckets of each histogram."""
    names = re.findall(r"^(tandem_\w+(?:\{.*\})?) \S+$", text, re.MULTILINE)
    kept = [name for name in names if "_bucket{" not in name or re.search(r'le="(0\.1|\+Inf)"', name)]
    whole = sorted({re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{") for name in kept})
    firsts = {re.sub(r'(peer|role|worker)="[^"]*",?', "", name): name for name in reversed(whole)}
    return sorted(firsts.values())


if __name__ == "__main__":
    with server() as running:
        exercise(running)
        text = httpx.get(f"{running.url}/metrics", timeout=30).text
    TARGET.write_text("\n".join(name for name in series(text) if "_created" not in name) + "\n")
    print(json.dumps({"series": len(recorded())}))
