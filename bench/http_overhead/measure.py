"""The loads: single requests for what the API adds to their times, many streams for its CPU time."""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from tokenizers import Tokenizer

from bench.http_overhead.worker import Stamps
from bench.serve.client import Client, Record, Target
from bench.serve.runner import drive, run_on_fast_loop
from bench.serve.workload import LoadRequest
from models.bundled import BUNDLED_FOLDER

LATENCY_OUTPUT_LEN = 8
WARMUPS = 4
STRIDE = 601
"""Tokens from the beginning of one prompt to that of the next, in the same text."""
STAMPS_TIMEOUT_S = 10.0


class Latency(msgspec.Struct, frozen=True):
    """Median seconds: from a client's request to the worker's message, from the first token to its event."""

    request_s: float
    token_s: float


class CpuTime(msgspec.Struct, frozen=True):
    """Seconds of the API server's process for each request, its first token included, and for each further
    token. `wall_s` is how long the load took, `prompt_tokens` the mean of its prompts.
    """

    per_request_s: float
    per_token_s: float
    wall_s: float
    prompt_tokens: float


def make_prompts(tokenizer_file: Path, count: int, num_tokens: int) -> list[str]:
    """Held-out code of about so many tokens each, no two alike."""
    lines = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    token_ids = tokenizer.encode("".join(json.loads(line)["prompt"] for line in lines)).ids
    starts = [number * STRIDE % (len(token_ids) - num_tokens) for number in range(count)]
    return [tokenizer.decode(token_ids[start : start + num_tokens]) for start in starts]


def measure_latency(target: Target, prompts: Sequence[str], stamps: Path) -> Latency:
    """One request after the other. Raises RuntimeError when one fails."""
    requests = [LoadRequest(prompt, LATENCY_OUTPUT_LEN) for prompt in prompts]
    records = _run(target, [*requests[:WARMUPS], *requests], 1)
    times = _read(stamps, records[-1].start)
    arrived = times.requests[-len(requests) :]
    answered = [times.steps[bisect(times.steps, at)] for at in arrived]
    seen = records[WARMUPS:]
    return Latency(
        request_s=statistics.median(at - each.start for at, each in zip(arrived, seen, strict=True)),
        token_s=statistics.median(each.token_times[0] - at for at, each in zip(answered, seen, strict=True)),
    )


def measure_cpu(target: Target, pid: int, prompts: Sequence[str], output_len: int) -> CpuTime:
    """All prompts at once, for one token and then for `output_len`. Raises RuntimeError when one fails."""
    process = psutil.Process(pid)

    def used_for(num_tokens: int) -> tuple[float, list[Record]]:
        before = process.cpu_times()
        records = _run(target, [LoadRequest(prompt, num_tokens) for prompt in prompts], len(prompts))
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system, records

    used_for(WARMUPS)
    first_s, _ = used_for(1)
    whole_s, records = used_for(output_len)
    return CpuTime(
        per_request_s=first_s / len(prompts),
        per_token_s=(whole_s - first_s) / (len(prompts) * (output_len - 1)),
        wall_s=max(record.end for record in records) - min(record.start for record in records),
        prompt_tokens=statistics.mean(record.prompt_tokens for record in records),
    )


def _run(target: Target, requests: Sequence[LoadRequest], concurrency: int) -> list[Record]:
    records = run_on_fast_loop(drive(Client(target), requests, concurrency))
    for request, record in zip(requests, records, strict=True):
        if record.error or record.output_tokens != request.output_len:
            what = record.detail or f"{record.output_tokens} tokens instead of {request.output_len}"
            raise RuntimeError(f"{target.base_url}: {record.error or 'a wrong answer'}: {what}")
    return records


def _read(path: Path, since: float) -> Stamps:
    """With those of a request that came after `since`: the worker writes them once it has nothing to do."""
    deadline = time.monotonic() + STAMPS_TIMEOUT_S
    while time.monotonic() < deadline:
        if path.exists():
            stamps = msgspec.json.decode(path.read_bytes(), type=Stamps)
            if stamps.requests[-1] >= since:
                return stamps
        time.sleep(0.01)
    raise RuntimeError(f"{path} lacks the times of the last request")
