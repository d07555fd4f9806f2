"""Models that a process loads before it forks. Its children share the weights, which are read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from huggingface_hub import try_to_load_from_cache

from protocol.config import ServeConfig

ModelIdentity: TypeAlias = tuple[object, ...]
"""A key that is equal for configurations that load and pack the same files in the same way on one host."""

_preloaded: dict[ModelIdentity, Any] = {}


def keep_preloaded(models: Sequence[tuple[ServeConfig, Any]]) -> None:
    """Keep exactly these loaded models for `load_model`."""
    _preloaded.clear()
    _preloaded.update({_identity(config): loaded for config, loaded in models})


def is_preloaded(config: ServeConfig) -> bool:
    return bool(_preloaded) and _identity(config) in _preloaded


def take_preloaded(config: ServeConfig) -> Any:
    """Return the `LoadedModel` kept for this configuration, if any, and forget it: callers may change it."""
    return _preloaded.pop(_identity(config)) if is_preloaded(config) else None


def _identity(config: ServeConfig) -> ModelIdentity:
    folder = Path(config.model)
    if not folder.exists():
        found = try_to_load_from_cache(config.model, "config.json", revision=config.revision)
        folder = Path(found).parent if isinstance(found, str) else folder
    paths = [folder, *sorted(folder.rglob("*"))]
    stats = [(str(path), path.stat()) for path in paths if path.is_file()]
    files = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
    # The worker's share of its host changes nothing about its weights.
    alike = replace(config, worker_threads=None, worker_host=None, gpu_memory_utilization=1.0)
    return msgspec.msgpack.encode(alike), files
