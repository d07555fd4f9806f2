"""What all programs in this folder ask for. Each is run with a server's URL and its model's folder."""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]
API = f"{URL}/v1"
ASK: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "When do we meet?"}]
TEXTS = ["the quick brown fox", "def main():"]


class Event(BaseModel):
    """A meeting. Without more fields, which this model would think of."""

    model_config = ConfigDict(extra="forbid")
    day: Literal["Monday", "Friday"]
    guests: list[Literal["Alice", "Bob"]] = Field(max_length=2)
    hour: int = Field(ge=8, le=18)


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


SCHEMA: Any = {"type": "object", "additionalProperties": False, "required": ["city"]}
SCHEMA["properties"] = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True},
}
