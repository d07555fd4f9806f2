"""An adapter's files, as far as they need no torch, and PEFT's `adapter_config.json`."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import TandemError
from protocol.fields import FieldError, to_struct

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
HEADER_BYTES = 1 << 20

_PIECE_BYTES = 1 << 24
"""Number of bytes read at a time."""
_MOST_PATTERN, _MOST_WAYS = 1024, 2**20
_LITERAL = re.compile(r"\\.|\[[^\]]*\]", re.DOTALL)
"""An escaped character or a set of characters, without any choice of its own."""
_REPEATED_GROUP = re.compile(r"\)[*+{]|\(\?(#|[a-zA-Z-]*x)")
"""A repeated group, or a comment or verbose flag, which can hide one."""
_CHOICES = {"*": 32, "+": 32, "{": 32, "?": 2}
"""The ways to match each repetition, for paths of some 50 characters."""
_CHANGES = {
    "use_dora": "DoRA scales the base's weights by column",
    "modules_to_save": "it replaces layers of the base",
    "layer_replication": "it changes the base's layers",
    "target_parameters": "it adapts parameters that are no linear layer's",
    "trainable_token_indices": "it changes embeddings",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "lora_bias": "it adds biases",
}
"""Fields that ask for more than low-rank products for linear layers."""


class AdapterError(TandemError):
    """An adapter that cannot be served; the message names the file, and the field or the tensor."""


class AdapterConfig(msgspec.Struct):
    """The fields of PEFT's `LoraConfig` that give its tensors their meaning."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool | None = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str | None = "none"

    def scale(self, path: str, rank: int) -> float:
        alpha = _by_pattern(self.alpha_pattern, path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, path: str) -> int:
        return int(_by_pattern(self.rank_pattern, path, self.r))


def check_files(path: str, max_rank: int) -> None:
    """Check everything that needs neither the model nor the tensors. Raises `AdapterError`."""
    folder = Path(path)
    parse_config(read_file(folder, CONFIG, HEADER_BYTES, lambda: None), max_rank)
    try:
        _open(folder, TENSORS).close()
    except OSError as error:
        raise AdapterError(f"{TENSORS}: cannot be read: {error}") from error


def read_file(folder: Path, name: str, most: int, on_piece: Callable[[], None]) -> bytes:
    """Return the whole file, of at most `most` bytes. Call `on_piece` after each piece. Raises
    `AdapterError`.
    """
    raw = bytearray()
    try:
        with _open(folder, name) as file:
            while len(raw) <= most and (piece := file.read(min(_PIECE_BYTES, most + 1 - len(raw)))):
                raw += piece
                on_piece()
    except OSError as error:
        raise AdapterError(f"{name}: cannot be read: {error}") from error
    if len(raw) > most:
        raise AdapterError(f"{name}: has more than the {most} bytes that an adapter of this model can have")
    return bytes(raw)


def _open(folder: Path, name: str) -> FileIO:
    """Open a regular file. Refuse a pipe or a device, which might never end."""
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    file = FileIO(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise AdapterError(f"{name}: is not a regular file")
    return file


def parse_config(raw: bytes, max_rank: int) -> AdapterConfig:
    """Parse `adapter_config.json`. Raises `AdapterError`, naming the field."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{CONFIG}: is not an object")
    try:
        config = to_struct(
            {key: fields[key] for key in AdapterConfig.__struct_fields__ if key in fields}, AdapterConfig
        )
    except FieldError as error:
        raise AdapterError(f"{CONFIG}: {error}") from error
    if config.peft_type != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type: must be LORA, got {config.peft_type[:64]!r}")
    if config.bias not in (None, "none"):
        raise AdapterError(f"{CONFIG}: bias: must be none, got {config.bias[:64]!r}")
    for name, why in _CHANGES.items():
        if fields.get(name):
            raise AdapterError(f"{CONFIG}: {name}: not supported: {why}")
    for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})):
        _check_pattern(pattern)
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if not 1 <= rank <= max_rank:
            raise AdapterError(f"{CONFIG}: r: must be from 1 to --max-lora-rank {max_rank}, got {rank}")
    return config


def _check_pattern(pattern: str) -> None:
    """Raise `AdapterError` for a pattern whose search could take for ever."""
    if len(pattern) > _MOST_PATTERN:
        limit = f"at most {_MOST_PATTERN} characters, got {len(pattern)}"
    elif _REPEATED_GROUP.search(bare := _LITERAL.sub("a", pattern)):
        limit = "no repeated group, comment or verbose flag, since a search for it could take for ever"
    elif (ways := _ways(bare)) > _MOST_WAYS:
        limit = f"at most {_MOST_WAYS} ways to match, as 4 repetitions or 20 optional characters have"
        limit += f", got {ways if ways < 1e18 else 'far more'}"
    else:
        return
    raise AdapterError(f"{CONFIG}: pattern {pattern[:64]!r}: {limit}")


def _ways(pattern: str) -> int:
    """Return a bound of the ways that a search tries: repetitions and groups of alternatives multiply."""
    ways, alternatives = 1, [1]
    for character in pattern:
        if character == "(":
            alternatives.append(1)
        elif character == "|":
            alternatives[-1] += 1
        elif character == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        ways *= _CHOICES.get(character, 1)
    return ways * math.prod(alternatives)


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: float) -> float:
    """Return the value of the first pattern that the path ends with, like PEFT's `rank_pattern`."""
    for key, value in (patterns or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", path)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterError(f"{CONFIG}: pattern {key[:64]!r}: {error}") from error
        if matches:
            return value
    return default
