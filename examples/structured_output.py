"""Gets JSON that matches a schema through OpenAI's Python client. A grammar enforces the schema.

    pip install openai
    python examples/structured_output.py [URL]

TANDEM_API_KEY is sent as the key, for servers that ask for one.
"""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "genre": {"enum": ["novel", "poems", "essay"]},
    },
    "required": ["title", "year", "genre"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    wanted = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt="A book: ",
        max_tokens=200,
        seed=7,
        extra_body={"response_format": wanted},
    )
    print(json.loads(answer.choices[0].text))


if __name__ == "__main__":
    main(*sys.argv[1:])
