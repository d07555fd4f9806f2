"""Loads a server from a separate process: each stream starts again when it has ended."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

BACK_OFF_S = 0.05
"""Pause after a refused request."""


@contextmanager
def load(url: str, streams: int, prompt_tokens: int, vocab_size: int, **fields: Any) -> Iterator[None]:
    """Run this number of streams with random prompts until the block ends."""
    numbers = [str(number) for number in (streams, prompt_tokens, vocab_size)]
    command = [sys.executable, __file__, urlsplit(url).netloc, *numbers, json.dumps(fields)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the load does not begin"
        yield
    finally:
        process.kill()
        process.communicate()


def _stream(seed: int, address: str, prompt_tokens: int, vocab_size: int, fields: dict[str, Any]) -> None:
    rng, pause = random.Random(seed), threading.Event()
    connection = http.client.HTTPConnection(address)
    while True:
        prompt = rng.choices(range(10, vocab_size), k=prompt_tokens)
        body = {"prompt": prompt, "stream": True, "ignore_eos": True, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        while answer.read(65536):
            pass
        if answer.status != 200:
            pause.wait(BACK_OFF_S)


if __name__ == "__main__":
    _, netloc, count, *numbers, given = sys.argv
    for number in range(int(count)):
        arguments = (number, netloc, *map(int, numbers), json.loads(given))
        threading.Thread(target=_stream, args=arguments).start()
    print("it has begun", flush=True)
