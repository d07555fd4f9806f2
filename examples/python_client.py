"""A streamed completion through OpenAI's Python client.

    pip install openai
    python examples/python_client.py [URL]

TANDEM_API_KEY is sent as the key, for servers that ask for one.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt="def read_file(path):\n", max_tokens=48, temperature=0.8, seed=7, stream=True
    )
    for event in stream:
        print(event.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
