"""Writes `suite.jsonl` anew: the schemas that are served, each with a seed with which its answer ends.

    python -m bench.schemas.choose FOLDER [--seeds 6]

FOLDER is a copy of JSON-Schema-Test-Suite, as the sources of `jsonschema` have it under json/. Whether an
answer is valid plays no part. Says how many are left out and why.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.own_server import serving
from bench.schemas.suite import SUITE, Case

DRAFTS = {
    "draft2020-12": None,
    "draft2019-09": None,
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
"""From the latest; those that say nothing of their draft are given its `$schema`."""
MOST_TOKENS = 120
"""Of a chosen answer, so that one on another kind of CPU, whose tokens may differ, ends too."""
CLIENTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    options, serve_options = parser.parse_known_args()
    left_out: Counter[str] = Counter()
    with (
        serving(["--no-disaggregation", "--dtype", "float32", *serve_options]) as http,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        schemas = list(found(options.folder / "tests"))
        chosen = list(clients.map(lambda each: choose(http, each[0], each[1], options.seeds), schemas))
    left_out.update(each for each in chosen if isinstance(each, str))
    cases = [each for each in chosen if isinstance(each, Case)]
    SUITE.write_bytes(b"".join(msgspec.json.encode(case) + b"\n" for case in cases))
    print(f"{len(schemas)} schemas, {len(cases)} chosen; left out:")
    for reason, count in left_out.most_common():
        print(f"{count:4}  {reason}")


def found(tests: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and schemas. Those that are `true` or `false` are none of a response format."""
    seen = set()
    for draft, uri in DRAFTS.items():
        for file in sorted((tests / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                schema = case["schema"]
                if not isinstance(schema, dict):
                    continue
                content = json.dumps({**schema, "$schema": None}, sort_keys=True)
                if content not in seen:
                    seen.add(content)
                    name = f"{file.relative_to(tests)}: {case['description']}"
                    yield name, schema if uri is None else {"$schema": uri, **schema}


def choose(http: httpx.Client, name: str, schema: dict[str, Any], seeds: int) -> Case | str:
    """The first answer that ends and is an object or a list with something in it, else the longest, or why
    there is none.
    """
    lengths = {}
    for seed in range(seeds):
        case = Case(name, seed, schema)
        answer = http.post("/v1/completions", json=case.request(max_tokens=MOST_TOKENS))
        if answer.status_code == 400:
            reason = answer.json()["error"]["message"].partition(": ")[2].partition("\n")[0]
            return re.sub(r"'\w+://[^']*'|/.*/|[\d.]+(e\d+)?", "...", reason)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            if len(choice["text"]) > 2 and choice["text"][0] in "{[":
                return case
            lengths[seed] = len(choice["token_ids"])
    if not lengths:
        return f"no answer ends within {MOST_TOKENS} tokens"
    return Case(name, max(lengths, key=lambda seed: lengths[seed]), schema)


if __name__ == "__main__":
    main()
