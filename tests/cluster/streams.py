"""Streams completions side by side, for use in a host's network.

    python -m tests.cluster.streams URL COUNT TOKENS

Prints "underway" once each stream has some tokens or has ended. The last line is a JSON list of `Stream`s.
The API key is in TANDEM_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import httpx
import msgspec

UNDERWAY = 8
"""A stream is under way after this number of events."""


class Stream(msgspec.Struct):
    text: str = ""
    events: int = 0
    events_before: int = 0
    """The number of events that came before all streams were under way."""
    longest_gap_s: float = 0.0
    error: str = ""


async def follow(client: httpx.AsyncClient, number: int, tokens: int, stream: Stream) -> None:
    body = {
        "model": "tandem-code-10m",
        "prompt": f"def function_{number}(path):\n",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }
    seen = 0.0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code} {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    stream.error = str(event["error"])
                    return
                now = time.monotonic()
                stream.longest_gap_s = max(stream.longest_gap_s, now - seen if seen else 0.0)
                seen = now
                stream.events += 1
                stream.text += "".join(choice["text"] for choice in event["choices"])
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"


async def main(url: str, count: int, tokens: int) -> None:
    headers = {"Authorization": f"Bearer {os.environ['TANDEM_API_KEY']}"}
    limits = httpx.Limits(max_connections=None)
    streams = [Stream() for _ in range(count)]
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=200, limits=limits) as client:
        tasks = [
            asyncio.create_task(follow(client, number, tokens, stream))
            for number, stream in enumerate(streams)
        ]
        while not all(
            stream.events >= UNDERWAY or task.done() for stream, task in zip(streams, tasks, strict=True)
        ):
            await asyncio.sleep(0.01)
        print("underway", flush=True)
        for stream in streams:
            stream.events_before = stream.events
        await asyncio.gather(*tasks)
    print(msgspec.json.encode(streams).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
