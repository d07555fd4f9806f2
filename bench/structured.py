"""What a schema costs, and what drafts of the text bring that it leaves no choice about, in one engine.

    python -m bench.structured [--model NAME] [--requests 1,16] [--rounds 7]

Three ways in turn, in each round: without a schema, with one, and with one and drafts of what it forces. All
generate as many tokens for each request; the median of the rounds counts. Then the same model is served, and
its first token awaited with the schema, which it knows by then, and without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx
from llguidance import LLMatcher

from bench.own_server import serving
from engine.engine import Engine
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from speculation.speculator import speculate

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "description": {"type": "string", "minLength": 30, "maxLength": 60},
        "categories": {"type": "array", "items": {"enum": ["first", "second"]}, "minItems": 3, "maxItems": 3},
        "is_available": {"type": "boolean"},
        "responsible_person": {"type": "string", "minLength": 10, "maxLength": 30},
    },
    "required": ["identifier", "description", "categories", "is_available", "responsible_person"],
    "additionalProperties": False,
}
PROMPT = list(range(100, 164))
FIRST_TOKENS = 50


def requests(lengths: Sequence[int], grammar: str | None, drafts: bool) -> list[EngineRequest]:
    """One for each of the lengths: the bound of a text that ends by itself, if it has a grammar."""
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[*PROMPT, number],
            sampling=SamplingParams(
                max_tokens=length, seed=number, grammar=grammar, ignore_eos=grammar is None
            ),
            speculation=RequestSpeculation(enabled=drafts),
        )
        for number, length in enumerate(lengths)
    ]


def run(engine: Engine, asked: Sequence[EngineRequest]) -> tuple[dict[str, int], float]:
    """Tokens of each request, and the seconds from the first step on that has all of them decode."""
    counts = {request.request_id: 0 for request in asked}
    for request in asked:
        engine.add(request)
    while not all(counts.values()):
        take(engine, counts)
    started = time.perf_counter()
    while engine.has_work():
        take(engine, counts)
    return counts, time.perf_counter() - started


def take(engine: Engine, counts: dict[str, int]) -> None:
    for output in engine.step().outputs:
        counts[output.request_id] += len(output.token_ids)


def first_token_s(http: httpx.Client, number: int, response_format: dict[str, Any]) -> float:
    """From the request to the first event of its stream."""
    body = {"prompt": [*PROMPT, number], "max_tokens": 1, "stream": True, "response_format": response_format}
    began = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        next(response.iter_lines())
        return time.perf_counter() - began


def print_first_token(model: str) -> None:
    with_schema = {"type": "json_schema", "json_schema": {"name": "record", "schema": SCHEMA}}
    formats: dict[str, dict[str, Any]] = {"without a schema": {"type": "text"}, "with a schema": with_schema}
    with serving(["--model", model, "--max-model-len", "1024"]) as http:
        seconds: dict[str, list[float]] = {way: [] for way in formats}
        for number in range(FIRST_TOKENS + 1):
            for way, response_format in formats.items():
                seconds[way].append(first_token_s(http, number, response_format))
    for way, taken in seconds.items():
        print(f"first token   {way:18}{1e3 * statistics.median(taken[1:]):9.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--requests", default="1,16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    engine = Engine(
        ServeConfig(model=arguments.model, max_num_seqs=64, max_model_len=1024), speculate=speculate
    )
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), overrides={"whitespace_flexible": False, "item_separator": ", "}
    )
    for number in map(int, arguments.requests.split(",")):
        counts, _ = run(engine, requests([400] * number, grammar, False))
        lengths = [counts[str(place)] for place in range(number)]
        ways = {
            "without a schema": requests(lengths, None, False),
            "with a schema": requests(lengths, grammar, False),
            "and its drafts": requests(lengths, grammar, True),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, asked in ways.items():
                seconds[way].append(run(engine, asked)[1])
        plain = statistics.median(seconds["without a schema"])
        for way, taken in seconds.items():
            median = statistics.median(taken)
            rate = sum(lengths) / median
            print(f"{number:3} requests  {way:18}{rate:9.0f} tokens/s  {plain / median:6.3f}")
    print_first_token(arguments.model)


if __name__ == "__main__":
    main()
