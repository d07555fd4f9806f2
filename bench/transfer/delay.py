"""What disaggregation adds between the first token and the second, and how much of the transfer hides.

One prefill worker and two decode workers, one that is reached over `shm` and one over `tcp`, each a process
with one thread, with the shape of Qwen3-0.6B and random weights. A prompt runs in chunks of an eighth. The
prefill worker serves prompts by itself too, which is the baseline; all take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from transformers import Qwen3Config

from bench.transfer.figures import Figure
from bench.transfer.workers import Cluster, random_prompt
from protocol.config import ServeConfig

CHUNKS = 8
DECODE = {"shm": 0.05, "tcp": 0.15}
"""Transports, and how large a share of the prefill's time the extra delay may be."""
BLOCK_BYTES = 28 * 2 * 16 * 8 * 128 * 2
MAX_TOKENS = 2


@dataclass(frozen=True)
class Served:
    """Seconds until the first token, and from there to the second."""

    first: float
    gap: float


def write_shape(folder: Path) -> None:
    """The configuration of Qwen3-0.6B; the weights are made up."""
    Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ).save_pretrained(folder)


def serve(cluster: Cluster, prompt_len: int, seed: int, decode: str | None) -> Served:
    prompt = random_prompt(prompt_len, cluster.vocab_size("prefill"), seed)
    first, second = sorted(cluster.generate("prefill", prompt, MAX_TOKENS, decode))
    return Served(first, second - first)


def start(cluster: Cluster, model: str, prompt_len: int) -> None:
    config = ServeConfig(
        model=model,
        dtype="bfloat16",
        device="cpu",
        compile="off",
        load_format="dummy",
        worker_threads=1,
        max_model_len=prompt_len + 16,
        max_num_batched_tokens=prompt_len // CHUNKS,
        kv_cache_memory_bytes=2 * (prompt_len // 16 + 2) * BLOCK_BYTES,
        enable_prefix_caching=False,
        kv_transports=",".join(DECODE),
        log_level="warning",
    )
    decoders = (("decode", name, msgspec.structs.replace(config, kv_transports=name)) for name in DECODE)
    for role, worker_id, settings in (("prefill", "prefill", config), *decoders):
        cluster.start((role, worker_id, settings))  # type: ignore[arg-type]


def delay(repeats: int, prompt_len: int = 4096) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        write_shape(Path(folder))
        start(cluster, folder, prompt_len)
        for decode in (None, *DECODE):
            serve(cluster, prompt_len // CHUNKS, 1, decode)  # links are made, kernels built
        rounds: list[dict[str | None, Served]] = []
        spent: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(repeats):
            rounds.append({None: serve(cluster, prompt_len, 10 * number, None)})
            for place, decode in enumerate(DECODE, 1):
                before = cluster.counters("prefill")
                rounds[-1][decode] = serve(cluster, prompt_len, 10 * number + place, decode)
                after = cluster.counters("prefill")
                spent[decode].append({name: after[name] - before[name] for name in after})
    for decode, at_most in DECODE.items():
        yield _delay(decode, prompt_len, at_most, rounds)
        yield _overlap(decode, spent[decode])


def _delay(decode: str, prompt_len: int, at_most: float, rounds: list[dict[str | None, Served]]) -> Figure:
    shares = [(each[decode].gap - each[None].gap) / each[None].first for each in rounds]
    ours, alone = (statistics.median(each[way].gap for each in rounds) for way in (decode, None))
    prefill = statistics.median(each[None].first for each in rounds)
    return Figure(
        what=f"{decode}: extra delay of the second token after {prompt_len}, of the prefill's time",
        value=statistics.median(shares) * 100,
        unit=" %",
        at_most=at_most * 100,
        ours=f"first to second token {ours * 1e3:.0f} ms",
        baseline=f"colocated {alone * 1e3:.0f} ms, prefill {prefill:.1f} s",
        samples=[share * 100 for share in shares],
    )


def _overlap(decode: str, spent: list[dict[str, float]]) -> Figure:
    counted = [each for each in spent if each["kv_transfers_total"]]
    if not counted:
        raise RuntimeError(f"no transfer over {decode} was counted")
    shares = [
        each["kv_transfer_hidden_seconds_total"] / each["kv_transfer_busy_seconds_total"] for each in counted
    ]
    busy = statistics.median(each["kv_transfer_busy_seconds_total"] for each in counted)
    return Figure(
        what=f"{decode}: share of the transfer that {CHUNKS} chunks hide",
        value=statistics.median(shares),
        at_least=0.8,
        ours=f"{busy * 1e3:.0f} ms on the way",
        samples=shares,
    )
