"""Compares engines of one model with weights and KV in each format: speed and quality of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from transformers import AutoConfig

from bench.quantize import quality, speed
from bench.quantize.cells import Cell
from engine.engine import Engine
from models.bundled import BUNDLED_MODEL, is_bundled_model
from protocol.config import ServeConfig

_TEXT_TOKENS = 1024
"""The most tokens of a held-out text."""


@dataclass(frozen=True)
class SpeedLoad:
    """Lengths of prompts and answers, numbers of concurrent requests, and rounds to take medians over
    (`speed.measure`).
    """

    prompt: int
    context: int
    output: int
    concurrencies: Sequence[int]
    rounds: int

    @property
    def longest(self) -> int:
        return max(self.prompt, self.context) + self.output

    @property
    def tokens(self) -> int:
        """Return the tokens of all requests at the highest concurrency."""
        return max(self.concurrencies) * (self.context + self.output)


class Row(msgspec.Struct, frozen=True):
    """Figures of a cell. `memory` is the bytes of the weights and of the KV at the highest concurrency."""

    cell: Cell
    weight_bytes: int
    kv_token_bytes: int
    memory: int
    speed: speed.Speed
    quality: quality.Quality | None


def compare(
    cells: Sequence[Cell], checkpoints: Mapping[str, Path], model: Path, load: SpeedLoad, texts: int
) -> list[Row]:
    """Measure each cell, the plain one first. The bundled model predicts `texts` held-out texts."""
    is_bundled = is_bundled_model(str(model))
    longest = max(load.longest, _TEXT_TOKENS if is_bundled else 0)
    config = _config(model, longest, load.tokens, max(load.concurrencies))
    made = {cell: speed.make_engine(cell.applied(config, checkpoints)) for cell in cells}
    engines = {cell.name: engine for cell, (engine, _) in made.items()}
    speeds = speed.measure(
        engines, load.concurrencies, load.prompt, load.output, load.rounds, context=load.context
    )
    qualities: dict[str, quality.Quality] = {}
    if texts:
        predicting = engines if is_bundled else _bundled(cells)
        qualities = quality.measure(predicting, cells[0].name, quality.held_out(texts))
    rows = []
    for cell, (engine, weight_bytes) in made.items():
        token_bytes = engine.pool.token_bytes
        memory = weight_bytes + token_bytes * load.tokens
        found = qualities.get(cell.name)
        rows.append(Row(cell, weight_bytes, token_bytes, memory, speeds[cell.name], found))
    return rows


def _bundled(cells: Sequence[Cell]) -> dict[str, Engine]:
    config = _config(BUNDLED_MODEL, _TEXT_TOKENS, _TEXT_TOKENS, 1)
    return {cell.name: Engine(cell.applied(config, {})) for cell in cells}


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
