"""The comparison of engines of one model with weights and KV in each format, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from transformers import AutoConfig

from bench.quantize import quality, speed
from bench.quantize.formats import FormatPair
from bench.report import markdown_table
from engine.engine import Engine
from models.bundled import BUNDLED_MODEL, is_bundled_model
from protocol.config import ServeConfig

_TEXT_TOKENS = 1024
"""Most tokens of a held-out text."""


class Row(msgspec.Struct, frozen=True):
    """Figures of a pair of formats. `memory` is the bytes of weights and KV at the highest concurrency."""

    formats: FormatPair
    weight_bytes: int
    kv_token_bytes: int
    memory: int
    speed: speed.Speed
    quality: quality.Quality | None


def compare(
    pairs: Sequence[FormatPair],
    checkpoints: Mapping[str, Path],
    model: Path,
    lengths: speed.SpeedLoad,
    texts: int,
) -> list[Row]:
    """Measure each pair of formats, plain first. The bundled model predicts `texts` held-out texts."""
    is_bundled = is_bundled_model(str(model))
    longest = max(lengths.longest, _TEXT_TOKENS if is_bundled else 0)
    config = _config(model, longest, lengths.tokens, max(lengths.concurrencies))
    made = {pair: speed.make_engine(pair.applied(config, checkpoints)) for pair in pairs}
    engines = {pair.name: engine for pair, (engine, _) in made.items()}
    speeds = speed.measure(engines, lengths)
    qualities: dict[str, quality.Quality] = {}
    if texts:
        predicting = engines if is_bundled else _bundled(pairs)
        qualities = quality.measure(predicting, pairs[0].name, quality.held_out(texts))
    rows = []
    for pair, (engine, weight_bytes) in made.items():
        token_bytes = engine.pool.token_bytes
        memory = weight_bytes + token_bytes * lengths.tokens
        found = qualities.get(pair.name)
        rows.append(Row(pair, weight_bytes, token_bytes, memory, speeds[pair.name], found))
    return rows


def _bundled(pairs: Sequence[FormatPair]) -> dict[str, Engine]:
    config = _config(BUNDLED_MODEL, _TEXT_TOKENS, _TEXT_TOKENS, 1)
    return {pair.name: Engine(pair.applied(config, {})) for pair in pairs}


def _config(model: Path, longest: int, tokens: int, requests: int) -> ServeConfig:
    """Return a configuration for requests of up to `longest` tokens, with KV for `tokens` in partly filled
    blocks.
    """
    shape = AutoConfig.from_pretrained(model)
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token_bytes = 4 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim
    block_size = 16
    return ServeConfig(
        model=str(model),
        device="cpu",
        dtype="bfloat16",
        max_model_len=min(longest + block_size, shape.max_position_embeddings),
        max_num_seqs=requests,
        block_size=block_size,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=(max(longest, tokens) + block_size * (requests + 2)) * token_bytes,
    )


def as_markdown(title: str, rows: Sequence[Row]) -> str:
    """Return the report. The first row is the plain one."""
    plain, concurrencies = rows[0].speed, list(rows[0].speed.decode)
    columns = ["weights", "KV", "MB of weights", "bytes of a token's KV", "MB in all", "prefill, tok/s"]
    columns += [f"decode, {each}" for each in concurrencies]
    if rows[0].quality is not None:
        columns += ["bits per byte", "KL to bf16, nats", "same next token"]
    lines = []
    for row in rows:
        cells = [row.formats.weights, row.formats.kv, f"{row.weight_bytes / 1e6:.1f}"]
        cells += [f"{row.kv_token_bytes:,}", f"{row.memory / 1e6:.1f}"]
        cells += [_rate(row.speed.prefill, plain.prefill)]
        cells += [_rate(row.speed.decode[each], plain.decode[each]) for each in concurrencies]
        if row.quality is not None:
            found = row.quality
            cells += [f"{found.bits_per_byte:.4f}", f"{found.divergence:.5f}", f"{found.agreement:.2%}"]
        lines.append(cells)
    return f"# {title}\n\nIn brackets: times bf16.\n\n{markdown_table(columns, lines, texts=2)}\n"


def _rate(rate: float, plain: float) -> str:
    return f"{rate:.1f} ({rate / plain:.2f})"
