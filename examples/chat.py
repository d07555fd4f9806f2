"""A chat in the terminal: each line of the input is a message, and the answers are streamed.

    python examples/chat.py [URL]

The model's tokenizer needs a chat template, or the server `--chat-template`.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.rstrip("\n")})
        answer = ""
        for event in client.chat.completions.create(
            model=model, messages=messages, max_tokens=64, temperature=0, stream=True
        ):
            piece = event.choices[0].delta.content or "" if event.choices else ""
            answer += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
