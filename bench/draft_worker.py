"""What drafts bring by where they are made: the router's plan against each fixed one, on one server.

    python -m bench.draft_worker [--loads 1,2,4,8,16,32] [--rounds 20] [serve options]

The bundled pair serves from 2 decode workers that share 1 draft worker. As on hosts of their own, the decode
workers never wait for the draft worker: they share the first core, all else has the other ones. In each
round as many requests as the load says run at once, for a second or two in turn as the router plans (`cost`)
and as the requests ask (`"speculative": {"place": "none"}`, `local`, `remote`): the host's good and bad
moments are everybody's. Before, the router's plan runs for `--warm-up` seconds.

Prints a JSON line for each load: the mean tokens per second of each; what the router's plan reaches of the
best fixed one in the same round, its trials included, as the mean and its standard error; each plan's
difference from round to round; and how many answers differ (bf16 may differ where two tokens are as good as
equal).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from bench.own_server import serving
from bench.speculate.over_http import load_prompts

FIXED = ("none", "local", "remote")
MAX_TOKENS = 128
LEAST_REQUESTS, LEAST_BATCHES = 12, 2
"""Of a plan in a round: for a second or more, and so that the batch is full for most of it."""
WORKERS = ["--no-disaggregation", "--decode-replicas", "2", "--draft-replicas", "1", "--worker-threads", "1"]

_salts = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--loads", default="1,2,4,8,16,32", help="requests at once, comma-separated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds, at each load")
    parser.add_argument("--num-tokens", default="auto", help="to draft in a step")
    parser.add_argument("--temperature", type=float, default=0.0)
    options, serve_options = parser.parse_known_args()
    count = options.num_tokens
    config = {"method": "draft_model", "num_speculative_tokens": count if count == "auto" else int(count)}
    drafts = ["--speculative-config", json.dumps(config)]
    with serving([*WORKERS, *drafts, *serve_options]) as http:
        assign_cores()
        for load in map(int, options.loads.split(",")):
            warm_up_until = time.monotonic() + options.warm_up
            while time.monotonic() < warm_up_until:
                run(http, load, "cost", options.temperature)
            result = compare(http, load, options.rounds, options.temperature)
            print(json.dumps({"load": load, **result}), flush=True)


def assign_cores() -> None:
    """To this process, and to those of the server that it has started."""
    first, *others = sorted(os.sched_getaffinity(0))
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        decodes = process.name().startswith("tandem:decode")
        for thread in process.threads():
            os.sched_setaffinity(thread.id, [first] if decodes else others or [first])


def compare(http: httpx.Client, load: int, rounds: int, temperature: float) -> dict[str, Any]:
    plans = ["cost", *FIXED]
    rates: dict[str, list[float]] = {plan: [] for plan in plans}
    different = 0
    for number in range(rounds):
        texts = {}
        for plan in plans[number % len(plans) :] + plans[: number % len(plans)]:
            rate, texts[plan] = run(http, load, plan, temperature)
            rates[plan].append(rate)
        different += sum(a != b for each in FIXED for a, b in zip(texts["cost"], texts[each], strict=True))
    means = {plan: statistics.fmean(found) for plan, found in rates.items()}
    best = max(FIXED, key=means.__getitem__)
    ratios = [mine / its for mine, its in zip(rates["cost"], rates[best], strict=True)]
    return {
        "tokens_per_s": {plan: round(mean) for plan, mean in means.items()},
        "best": best,
        "cost_to_best": round(statistics.fmean(ratios), 3),
        "error": round(_deviation(ratios) / len(ratios) ** 0.5, 3),
        "deviation": {plan: round(_deviation(found) / means[plan], 3) for plan, found in rates.items()},
        "different": different,
    }


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def run(http: httpx.Client, load: int, plan: str, temperature: float) -> tuple[float, list[str]]:
    """Tokens per second of all, and the texts."""
    prompts = load_prompts(max(LEAST_BATCHES * load, LEAST_REQUESTS))
    salt = str(next(_salts))  # nothing is left of an earlier round
    speculative = {} if plan == "cost" else {"speculative": {"place": plan}}

    def ask(index: int) -> tuple[str, int]:
        body: dict[str, Any] = {
            "prompt": prompts[index],
            "max_tokens": MAX_TOKENS,
            "temperature": temperature,
            "seed": index,
            "ignore_eos": True,
            "cache_salt": salt,
            **speculative,
        }
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(load) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    seconds = time.perf_counter() - began
    return sum(count for _, count in answers) / seconds, [text for text, _ in answers]


if __name__ == "__main__":
    main()
