"""The schemas, what is asked with each, and what makes an answer valid.

`suite.jsonl` has those schemas of https://github.com/json-schema-org/JSON-Schema-Test-Suite (MIT, see
LICENSE) that Tandem serves, each once, from the latest draft that has it.
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
"""The model has read code alone, and hardly ever ends: left to itself it goes on with a number for ever."""


class Case(msgspec.Struct, frozen=True):
    """`name` is the file in the suite and the case's description; `seed` one with which the answer ends."""

    name: str
    seed: int
    schema: dict[str, Any]

    def request(self, **fields: Any) -> dict[str, Any]:
        """The body of a completion."""
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
    """`finish_reason` is an error's text where there is no answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def satisfies(self, schema: dict[str, Any]) -> bool:
        """An answer that is cut off does not."""
        return self.finish_reason == "stop" and is_valid(self.text, schema)


def load() -> list[Case]:
    return [msgspec.json.decode(line, type=Case) for line in SUITE.read_bytes().splitlines()]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """By jsonschema, formats too. Numbers are decimals: as floats 0.0039 is no multiple of 0.0001."""
    kind = validator_for(schema, default=Draft202012Validator)
    exact = json.loads(json.dumps(schema), parse_float=_decimal)
    try:
        value = json.loads(text, parse_float=_decimal)
    except ValueError:
        return False
    with localcontext(prec=MAX_TOKENS * 4):
        return bool(kind(exact, format_checker=kind.FORMAT_CHECKER).is_valid(value))


def _decimal(text: str) -> Decimal | float:
    """JSON's numbers have no bounds, decimals' exponents do."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)
