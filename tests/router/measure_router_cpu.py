"""CPU time that the router spends per streamed token, all its threads together.

Worker and clients run in processes of their own. Run: `python tests/router/measure_router_cpu.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from conftest import byte_level_tokenizer  # noqa: E402
from fake_worker import FakeWorker  # noqa: E402

from messaging.sockets import ClusterKeys  # noqa: E402
from protocol.config import ServeConfig  # noqa: E402
from router.server import RouterServer  # noqa: E402

NUM_TOKENS = 200


def work(endpoint: str, keys: ClusterKeys, stop) -> None:
    worker = FakeWorker(endpoint, keys, step_s=0.005, vocab_size=400, max_model_len=4096).start()
    stop.wait()
    worker.stop()


def stream(port: int, body: dict) -> int:
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        client.sendall(
            head % (b"/v1/chat/completions" if "messages" in body else b"/v1/completions", len(raw))
        )
        client.sendall(raw)
        size = 0
        while part := client.recv(1 << 16):
            size += len(part)
    return size


def load(port: int, concurrency: int, body: dict, start, done) -> None:
    start.wait()
    threads = [threading.Thread(target=stream, args=(port, body)) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    bodies = {
        "completions": {"prompt": "the quick brown fox", "max_tokens": NUM_TOKENS, "stream": True},
        "chat": {
            "messages": [{"role": "user", "content": "the fox"}],
            "max_tokens": NUM_TOKENS,
            "stream": True,
        },
        "stop strings": {
            "prompt": "the quick brown fox",
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "stop": ["never", "\n\n"],
        },
        "logprobs=5": {"prompt": "the fox", "max_tokens": NUM_TOKENS, "stream": True, "logprobs": 5},
        "not streamed": {"prompt": "the quick brown fox", "max_tokens": NUM_TOKENS},
    }
    with tempfile.TemporaryDirectory() as folder:
        byte_level_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        keys = ClusterKeys.generate()
        server = RouterServer(ServeConfig(model=folder, port=0), keys)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        stop = context.Event()
        worker = context.Process(target=work, args=(server.worker_endpoint, keys, stop), daemon=True)
        worker.start()
        while server.state.not_ready() is not None:
            time.sleep(0.05)
        for name, body in bodies.items():
            for concurrency in (1, 4, 16, 64):
                start, done = context.Event(), context.Event()
                client = context.Process(
                    target=load, args=(server.port, concurrency, body, start, done), daemon=True
                )
                client.start()
                time.sleep(2.0)
                before, wall = time.process_time(), time.monotonic()
                start.set()
                done.wait()
                used, wall = time.process_time() - before, time.monotonic() - wall
                tokens = concurrency * NUM_TOKENS
                print(
                    f"{name:14} {concurrency:3} streams: {used / tokens * 1e6:6.1f} us/token, {wall:5.2f} s"
                )
                client.join()
        stop.set()
        worker.join()
        server.stop()
        thread.join()


if __name__ == "__main__":
    main()
