"""Answers many prompts from a file of JSON lines, several at a time, in the order of the file.

    python examples/batch.py PROMPTS.jsonl ANSWERS.jsonl [URL]

Each line is the body of a completion, as in {"prompt": "def f(", "max_tokens": 16}. When the server is busy
(429), a request is sent again after the time that the server asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from openai import AsyncOpenAI

AT_ONCE = 32
RETRIES = 8


async def main(prompts: str, answers: str, url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("TANDEM_API_KEY", "none")
    turns = asyncio.Semaphore(AT_ONCE)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=RETRIES) as client:
        model = (await client.models.list()).data[0].id

        async def complete(line: str) -> str:
            async with turns:
                answer = await client.completions.create(**{"model": model, **json.loads(line)})
            tokens = answer.usage.completion_tokens if answer.usage else None
            return json.dumps({"text": answer.choices[0].text, "completion_tokens": tokens})

        lines = [line for line in Path(prompts).read_text().splitlines() if line.strip()]
        found = await asyncio.gather(*(complete(line) for line in lines))
    Path(answers).write_text("".join(f"{line}\n" for line in found))
    print(f"{len(found)} answers in {answers}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
