"""Prompts and schemas that the programs in this folder share. Each program gets a server's URL and its
model's folder.
"""

from __future__ import annotations

import sys
from typing import Any

URL = sys.argv[1]
API = f"{URL}/v1"
ASK: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "When do we meet?"}]
TEXTS = ["the quick brown fox", "def main():"]
SCHEMA: Any = {"type": "object", "additionalProperties": False, "required": ["city"]}
SCHEMA["properties"] = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True},
}
