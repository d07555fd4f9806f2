"""Whether answers satisfy their schemas, whatever drafts, hand-offs and deaths of workers do to them.

    python -m bench.schemas [--methods none,suffix,draft_model,eagle] [--placements colocated,split]
        [--schemas 259] [options of tandem serve]

The bundled model answers each schema of the suite in float32, sampling at random: without any drafts or with
those of a method and of the grammar; on two decode workers, or on those after a prefill worker; left in
peace, then with decode workers killed in turn in the middle of a wave of answers.

Prints a JSON line for each of these. `valid` answers end, and satisfy their schema by jsonschema; `equal`
ones have the tokens of the first line's. `interrupted` counts the requests that went on at another worker,
`accepted` the drafted tokens that became output, by method. Lines of equal `digest`, of other runs too, have
the same tokens. Ends with 1 unless all answers are valid and equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import httpx

from bench.kills import total
from bench.own_server import serving
from bench.schemas.suite import Answer, Case, load

PLACEMENTS = {
    "colocated": ["--no-disaggregation"],
    "split": ["--prefill-replicas", "1", "--placement", "least_loaded"],
}
DECODE_WORKERS = 2
WAVE = 40
"""Answers at a time, and so those for each death."""
UNDER_WAY_TOKENS = 3
DRAFTED_TOKENS = 4
ACCEPTED = "tandem_spec_decode_num_accepted_tokens_total"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", default="none,suffix,draft_model,eagle")
    parser.add_argument("--placements", default="colocated,split")
    parser.add_argument("--schemas", type=int, help="the first so many; default: all")
    options, serve_options = parser.parse_known_args()
    cases = load()[: options.schemas]
    expected: list[Answer] | None = None
    is_right = True
    for placement in options.placements.split(","):
        for method in options.methods.split(","):
            with serving([*flags(placement, method), *serve_options]) as http:
                for killed in (0, -(-len(cases) // WAVE)):
                    answers = list(answer_all(http, cases, method != "none", bool(killed)))
                    expected = expected or answers
                    found = judged(cases, answers, expected)
                    is_right &= found["valid"] == found["equal"] == len(cases)
                    variant = {"placement": placement, "method": method, "killed": killed}
                    print(json.dumps({**variant, **found, **counted(http)}), flush=True)
    sys.exit(not is_right)


def flags(placement: str, method: str) -> list[str]:
    """Drafts are of a set length, whether they pay or not."""
    found = ["--dtype", "float32", "--decode-replicas", str(DECODE_WORKERS), *PLACEMENTS[placement]]
    if method != "none":
        speculation = {"method": method, "num_speculative_tokens": DRAFTED_TOKENS}
        found += ["--draft-placement", "local", "--speculative-config", json.dumps(speculation)]
    return found


# --- asking -------------------------------------------------------------------------------------------


def answer_all(http: httpx.Client, cases: Sequence[Case], drafts: bool, kills: bool) -> Iterator[Answer]:
    """Wave by wave. With `kills` a decode worker dies in each, with a quarter of its answers under way."""
    for number, start in enumerate(range(0, len(cases), WAVE)):
        wave = cases[start : start + WAVE]
        victim = ready_worker(http, f"decode-{number % DECODE_WORKERS}") if kills else None
        under_way = Semaphore(0)
        with ThreadPoolExecutor(WAVE) as clients:
            answers = [clients.submit(ask, http, case, drafts, under_way.release) for case in wave]
            if victim is not None:
                for _ in range(len(wave) // 4):
                    under_way.acquire()
                os.kill(victim, signal.SIGKILL)
            yield from (answer.result() for answer in answers)


def ready_worker(http: httpx.Client, name: str) -> int:
    """Its process id, once it and all others serve."""
    while True:
        workers = http.get("/workers").json()["workers"]
        pids = {worker["id"]: worker["pid"] for worker in workers if worker["lifecycle"] == "ready"}
        if name in pids and sum("decode" in each for each in pids) == DECODE_WORKERS:
            return int(pids[name])
        time.sleep(0.1)


def ask(http: httpx.Client, case: Case, drafts: bool, is_under_way: Callable[[], object]) -> Answer:
    """Calls `is_under_way` once, at the latest when there is nothing to come."""
    answer = Answer()
    told = False
    body = case.request(stream=True, speculative={"enabled": drafts})
    with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            answer.finish_reason = response.read().decode()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                take(json.loads(line[6:]), answer)
            if not told and len(answer.token_ids) >= UNDER_WAY_TOKENS:
                told = True
                is_under_way()
    if not told:
        is_under_way()
    return answer


def take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.finish_reason = event["error"]["message"]
    for choice in event.get("choices", ()):
        answer.text += choice["text"]
        answer.token_ids += choice["token_ids"]
        answer.finish_reason = choice["finish_reason"]


# --- what came ----------------------------------------------------------------------------------------


def judged(cases: Sequence[Case], answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, Any]:
    """What is wrong is told on standard error."""
    valid = [answer.satisfies(case.schema) for case, answer in zip(cases, answers, strict=True)]
    equal = [answer.token_ids == other.token_ids for answer, other in zip(answers, expected, strict=True)]
    for case, answer, is_valid, is_equal in zip(cases, answers, valid, equal, strict=True):
        if not (is_valid and is_equal):
            wrong = "differs" if is_valid else "is not valid"
            print(f"{case.name} {wrong}, {answer.finish_reason}: {answer.text}", file=sys.stderr)
    tokens = json.dumps([answer.token_ids for answer in answers]).encode()
    return {
        "schemas": len(cases),
        "valid": sum(valid),
        "equal": sum(equal),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "digest": hashlib.blake2b(tokens, digest_size=6).hexdigest(),
    }


def counted(http: httpx.Client) -> dict[str, Any]:
    """By the server since its start."""
    return {
        "interrupted": total(http, "tandem_requests_placed_anew_total"),
        "handoffs": total(http, "tandem_handoffs_total"),
        "accepted": by_method(http.get("/metrics").text, ACCEPTED),
    }


def by_method(metrics: str, name: str) -> dict[str, float]:
    """What `/metrics` says of one that speculation's methods count, over all workers."""
    found: dict[str, float] = {}
    for method, count in re.findall(rf'{name}{{.*method="(\w+)".*}} (\S+)', metrics):
        found[method] = found.get(method, 0.0) + float(count)
    return found


if __name__ == "__main__":
    main()
