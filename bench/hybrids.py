"""`python -m bench.hybrids`: the bundled hybrid beside the pure model of its size, in one process, in turns.

Decoding with short and long contexts, the bytes that a running sequence holds, and what part of a chat's
prompts is found in the prefix cache.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.quantize import speed
from engine.engine import Engine
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

HYBRID = BUNDLED_FOLDER / "tandem-code-10m-hybrid"
MIDDLE, LONG = 256, 4096
SYSTEM, QUESTION, ANSWER = 256, 64, 32
"""Tokens of what all conversations begin with, and of each turn."""


def main(
    hybrid: Annotated[Path, typer.Option(exists=True, resolve_path=True, help="folder of a hybrid")] = HYBRID,
    concurrency: Annotated[str, typer.Option(help="requests that decode at once")] = "1,16",
    output_len: Annotated[int, typer.Option(min=2, help="tokens that are decoded")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
) -> None:
    """Print tokens per second, bytes and hits of both, and their ratios."""
    torch.set_num_threads(threads)
    requests = [int(number) for number in concurrency.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        models = [BUNDLED_MODEL, hybrid]
        engines = {
            model.name: speed.make_engine(_config(_with_room(model, Path(folder)), max(requests)))[0]
            for model in models
        }
    table = Table("", *engines, "ratio", title=f"{threads} threads")
    for context in (speed.PROMPT, MIDDLE, LONG):
        for number in requests:
            values = _decode_speeds(list(engines.values()), number, context, output_len, rounds)
            _add(table, f"decode, {number} at {context} tokens, tokens/s", values)
    for context in (MIDDLE, LONG):
        values = [_bytes_of_sequence(engine, context) for engine in engines.values()]
        _add(table, f"bytes of a sequence of {context} tokens", values)
    _add(table, "share of a chat's prompts that is cached, %", [_chat_hits(e) for e in engines.values()])
    Console().print(table)


def _with_room(model: Path, folder: Path) -> Path:
    """The model with a context that is long enough. It was trained for less, which is no matter of speed."""
    copy = folder / model.name
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    return copy


def _config(model: Path, requests: int) -> ServeConfig:
    return ServeConfig(
        model=str(model),
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=requests,
        kv_cache_memory_bytes=512 << 20,
    )


def _decode_speeds(
    engines: Sequence[Engine], requests: int, context: int, output: int, rounds: int
) -> list[float]:
    """Tokens per second of the median step, which engines take in turns: a host's moods meet all of them.

    All requests decode, and their prompts are in the cache before.
    """
    seconds: list[list[float]] = [[] for _ in engines]
    for round_number in range(rounds):
        name = f"{round_number}-{context}-{requests}"
        for engine in engines:
            speed.answer(engine, name, requests, context, 1)
            speed.begin(engine, name, requests, context, output)
        for _ in range(output - 1):
            for engine, found in zip(engines, seconds, strict=True):
                started = time.perf_counter()
                engine.step()
                found.append(time.perf_counter() - started)
    return [requests / statistics.median(found) for found in seconds]


def _bytes_of_sequence(engine: Engine, context: int) -> float:
    state_slots = engine.pool.state_slots
    return engine.pool.token_bytes * context + (
        0 if state_slots is None else state_slots.layout.state_slot_bytes
    )


def _chat_hits(engine: Engine, conversations: int = 16, turns: int = 4) -> float:
    """Percent of the prompts' tokens."""
    text = _held_out(SYSTEM + conversations * turns * QUESTION)
    spoken = {str(number): text[:SYSTEM] for number in range(conversations)}
    before = engine.stats()
    for turn in range(turns):
        for number, name in enumerate(spoken):
            start = SYSTEM + (number * turns + turn) * QUESTION
            spoken[name] = spoken[name] + text[start : start + QUESTION]
        answers = _answers(engine, spoken, turn)
        spoken = {name: tokens + answers[name] for name, tokens in spoken.items()}
    after = engine.stats()
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    return 100 * found / (after.prefix_query_tokens - before.prefix_query_tokens)


def _answers(engine: Engine, prompts: Mapping[str, list[int]], turn: int) -> dict[str, list[int]]:
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    for name, tokens in prompts.items():
        request = EngineRequest(request_id=f"{turn}-{name}", prompt_token_ids=tokens, sampling=sampling)
        engine.add(request)
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id.partition("-")[2]] += output.token_ids
    return answers


def _held_out(count: int) -> list[int]:
    """So many tokens of the bundled prompts."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokens: list[int] = []
    for line in (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text("utf-8").splitlines():
        tokens += tokenizer(json.loads(line)["prompt"]).input_ids
    return tokens[:count]


def _add(table: Table, name: str, values: Sequence[float]) -> None:
    table.add_row(name, *(f"{value:,.0f}" for value in values), f"{values[1] / values[0]:.2f}")


if __name__ == "__main__":
    typer.run(main)
