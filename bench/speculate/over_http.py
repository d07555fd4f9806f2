"""Speculation as a client sees it: two servers, one of which speculates, take turns with the same prompts.

    python -m bench.speculate.over_http                       # all methods, temperature 0 and 0.7
    python -m bench.speculate.over_http --method ngram --prompts 32

Both serve the bundled model colocated. The ratio is that of output tokens per second, prompts included; which
server comes first alternates. Prints one JSON line for each method and temperature: the ratio's median and
all of its rounds, and how many texts differ. `--method none` compares two equal servers: the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import httpx

from bench.own_server import serving
from models.bundled import BUNDLED_FOLDER
from protocol.speculation import METHODS

MAX_TOKENS = 128
NONE = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--method", action="append", choices=[*METHODS, NONE])
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--prompts", type=int, default=16, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    serve = ["--no-disaggregation"]
    if options.threads is not None:
        serve += ["--worker-threads", str(options.threads)]
    prompts = load_prompts(options.prompts)
    for method in options.method or METHODS:
        speculate = [] if method == NONE else ["--speculative-config", json.dumps({"method": method})]
        with serving(serve) as plain, serving([*serve, *speculate]) as speculating:
            for temperature in options.temperature or [0.0, 0.7]:
                result = compare(plain, speculating, prompts, temperature, options.rounds)
                print(json.dumps({"method": method, "temperature": temperature, **result}), flush=True)


def load_prompts(count: int) -> list[str]:
    lines = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines][:count]


def compare(
    plain: httpx.Client, speculating: httpx.Client, prompts: Sequence[str], temperature: float, rounds: int
) -> dict[str, object]:
    """Ratios of the tokens per second of each round, and how many texts differ."""
    ratios, different = [], 0
    for number in range(-1, rounds):  # the first does not count
        tokens, seconds = [0, 0], [0.0, 0.0]
        for index, prompt in enumerate(prompts):
            texts = ["", ""]
            for which in (0, 1) if index % 2 else (1, 0):
                server, seed = (plain, speculating)[which], len(prompts) * (number + 1) + index
                began = time.perf_counter()
                texts[which], count = complete(server, prompt, temperature, seed)
                seconds[which] += time.perf_counter() - began
                tokens[which] += count
            different += texts[0] != texts[1]
        if number >= 0:
            ratios.append(tokens[1] / seconds[1] * seconds[0] / tokens[0])
    return {
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in sorted(ratios)],
        "different": different,
    }


def complete(http: httpx.Client, prompt: str, temperature: float, seed: int) -> tuple[str, int]:
    """The text, and its number of tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "seed": seed,
        "cache_salt": f"{seed} {temperature}",  # nothing is left of an earlier prompt
    }
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


if __name__ == "__main__":
    main()
