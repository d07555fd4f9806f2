"""JSON schemas, the requests that use them, and the check of an answer.

`suite.jsonl` has the schemas of https://github.com/json-schema-org/JSON-Schema-Test-Suite (MIT, see LICENSE)
that Tandem supports, each once, from the latest draft that has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import msgspec
from jsonschema.validators import Draft202012Validator, validator_for

SUITE = Path(__file__).with_name("schema_suite.jsonl")
MAX_TOKENS = 200
EOS_BIAS = {"0": 12.0}
"""Raises the chance of the end of text: trained on code alone, the model would never end a number."""


class Case(msgspec.Struct, frozen=True):
    """A schema. `name` is the suite's file and the case's description; with `seed` the answer ends."""

    name: str
    seed: int
    schema: dict[str, Any]

    def request(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a completion."""
        return {
            "prompt": f"# {self.name.partition(': ')[2]}\nvalue = json.loads('",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "case", "strict": True, "schema": self.schema},
            },
            "temperature": 1.0,
            "seed": self.seed,
            "logit_bias": EOS_BIAS,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
            **fields,
        }


@dataclass
class Answer:
    """An answer. If there is none, `finish_reason` is the error's text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def satisfies(self, schema: dict[str, Any]) -> bool:
        """Tell whether the answer matches a schema. A truncated answer does not."""
        return self.finish_reason == "stop" and is_valid(self.text, schema)


def load() -> list[Case]:
    return [msgspec.json.decode(line, type=Case) for line in SUITE.read_bytes().splitlines()]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Validate by jsonschema, formats included, with decimals: as a float 0.0039 is no multiple of 0.0001."""
    kind = validator_for(schema, default=Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=_decimal)
    try:
        value = json.loads(text, parse_float=_decimal)
    except ValueError:
        return False
    with localcontext(prec=MAX_TOKENS * 4):
        return bool(kind(exact, format_checker=kind.FORMAT_CHECKER).is_valid(value))


def _decimal(text: str) -> Decimal | float:
    """Parse a number. JSON's numbers have no bounds, but decimals' exponents do."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)
