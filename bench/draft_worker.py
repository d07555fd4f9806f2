"""What drafts bring by where they are made: tokens per second against none, on the same server.

    python -m bench.draft_worker [--loads 1,4,16,32] [--rounds 5] [serve options]

The bundled pair serves from 2 decode workers that share 1 draft worker, once for each of `--draft-placement`
local, remote and cost. In each round as many requests as the load says run at once, once with drafts and once
without (`"speculative": {"enabled": false}`); which comes first alternates. Prints a JSON line for each
placement and load: the ratio's median and its rounds, and how many answers differ (bf16 may differ where two
tokens are as good as equal). Then one for each load: what `cost` reaches of the best fixed placement, none
included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.kills import serving
from bench.speculate.over_http import load_prompts

PLACEMENTS = ("local", "remote", "cost")
MAX_TOKENS = 128
LEAST_REQUESTS = 8
"""Of a round: one request alone is too short to be measured."""
WORKERS = ["--no-disaggregation", "--decode-replicas", "2", "--draft-replicas", "1"]

_salts = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--placement", action="append", choices=PLACEMENTS)
    parser.add_argument("--loads", default="1,4,16,32", help="requests at once, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", default="auto", help="to draft in a step")
    parser.add_argument("--temperature", type=float, default=0.0)
    options, serve_options = parser.parse_known_args()
    loads = [int(load) for load in options.loads.split(",")]
    count = options.num_tokens
    config = {"method": "draft_model", "num_speculative_tokens": count if count == "auto" else int(count)}
    ratios: dict[tuple[str, int], float] = {}
    for placement in options.placement or PLACEMENTS:
        drafts = ["--speculative-config", json.dumps(config), "--draft-placement", placement]
        with serving([*WORKERS, *drafts, *serve_options]) as http:
            for load in loads:
                result = compare(http, load, options.rounds, options.temperature)
                ratios[placement, load] = result["ratio"]
                print(json.dumps({"placement": placement, "load": load, **result}), flush=True)
    for load in loads:
        fixed = [ratios[key] for key in (("local", load), ("remote", load)) if key in ratios]
        if ("cost", load) in ratios and fixed:
            print(json.dumps({"load": load, "cost_to_best": round(ratios["cost", load] / max(1, *fixed), 3)}))


def compare(http: httpx.Client, load: int, rounds: int, temperature: float) -> dict[str, Any]:
    """Tokens per second with drafts over those without."""
    prompts = load_prompts(max(load, LEAST_REQUESTS))
    found: list[float] = []
    plain_rates: list[float] = []
    different = 0
    for number in range(-1, rounds):  # the first does not count
        rates: dict[bool, float] = {}
        texts: dict[bool, list[str]] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            rates[drafts], texts[drafts] = run(http, prompts, load, drafts, temperature)
        different += sum(a != b for a, b in zip(texts[True], texts[False], strict=True))
        if number >= 0:
            found.append(rates[True] / rates[False])
            plain_rates.append(rates[False])
    return {
        "ratio": round(statistics.median(found), 3),
        "rounds": [round(ratio, 3) for ratio in sorted(found)],
        "plain_tokens_per_s": round(statistics.median(plain_rates)),
        "different": different,
    }


def run(
    http: httpx.Client, prompts: Sequence[str], load: int, drafts: bool, temperature: float
) -> tuple[float, list[str]]:
    """Tokens per second of all, and the texts."""
    salt = str(next(_salts))  # nothing is left of an earlier round

    def ask(index: int) -> tuple[str, int]:
        body: dict[str, Any] = {
            "prompt": prompts[index],
            "max_tokens": MAX_TOKENS,
            "temperature": temperature,
            "seed": index,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        if not drafts:
            body["speculative"] = {"enabled": False}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    seconds = time.perf_counter() - began
    return sum(count for _, count in answers) / seconds, [text for text, _ in answers]


if __name__ == "__main__":
    main()
