"""Pairs of a weight format and a KV format to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from protocol.config import ServeConfig
from protocol.speculation import Quantization

PLAIN = "bf16"
"""The format of unquantized weights or KV."""

ROUNDED: tuple[str, ...] = get_args(Quantization)
KV_FORMATS = (PLAIN, "int8", "fp8")
HEAD = "+head"
"""Suffix of a weight format: the output head is quantized as well."""


@dataclass(frozen=True)
class FormatPair:
    weights: str
    kv: str = PLAIN

    @property
    def name(self) -> str:
        return self.weights if self.kv == PLAIN else f"{self.weights}, KV {self.kv}"

    def applied(self, config: ServeConfig, checkpoints: Mapping[str, Path]) -> ServeConfig:
        """Return a plain model's configuration with these formats; `checkpoints` are quantized copies."""
        layers = self.weights.removesuffix(HEAD)
        changes: dict[str, Any] = {"quantize_lm_head": self.weights.endswith(HEAD)}
        if self.kv != PLAIN:
            changes["kv_cache_dtype"] = self.kv
        if layers in checkpoints:
            changes["model"] = str(checkpoints[layers])
        elif layers != PLAIN:
            changes["quantization"] = layers
        return replace(config, **changes)


def parse_pairs(weights: str, kv: str, checkpoints: Mapping[str, Path]) -> list[FormatPair]:
    """Parse comma-separated formats. The plain pair, to which the others are compared, comes first. Raises
    ValueError.
    """
    known = [PLAIN, *ROUNDED, *checkpoints]
    names = [*weights.split(","), *(name for name in checkpoints if name not in weights.split(","))]
    for name in names:
        if name.removesuffix(HEAD) not in known:
            raise ValueError(f"--format: {name!r} is not one of {','.join(known)}, with or without {HEAD}")
    kinds = kv.split(",")
    for kind in kinds:
        if kind not in KV_FORMATS:
            raise ValueError(f"--kv: {kind!r} is not one of {','.join(KV_FORMATS)}")
    pairs = [FormatPair(PLAIN), *(FormatPair(name, kind) for name in names for kind in kinds)]
    return list(dict.fromkeys(pairs))


def parse_checkpoints(texts: list[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER arguments. Raises ValueError."""
    checkpoints = {}
    for each in texts:
        name, _, folder = each.partition("=")
        if not name or name in (PLAIN, *ROUNDED) or any(char in name for char in ",+"):
            raise ValueError(f"--checkpoint: {each!r} has no name of its own, as in awq=folder")
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"--checkpoint: {each!r}: {folder!r} is no folder with a model")
        checkpoints[name] = Path(folder)
    return checkpoints
