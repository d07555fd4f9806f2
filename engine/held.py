"""Models that a process has loaded for those that it forks. They share it, as nobody writes to weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from huggingface_hub import try_to_load_from_cache

from protocol.config import ServeConfig

ModelIdentity: TypeAlias = tuple[object, ...]
"""Equal where the same files would be loaded and packed in the same way, on the same host."""

_held: dict[ModelIdentity, Any] = {}


def hold(models: Sequence[tuple[ServeConfig, Any]]) -> None:
    """Keep these loaded models, and no others, for `load_model`."""
    _held.clear()
    _held.update({_identity(config): loaded for config, loaded in models})


def holds(config: ServeConfig) -> bool:
    return bool(_held) and _identity(config) in _held


def take(config: ServeConfig) -> Any:
    """The `LoadedModel` that is held for this configuration, if any. Whoever takes it may change it."""
    return _held.pop(_identity(config)) if holds(config) else None


def _identity(config: ServeConfig) -> ModelIdentity:
    folder = Path(config.model)
    if not folder.is_dir():
        found = try_to_load_from_cache(config.model, "config.json", revision=config.revision)
        folder = Path(found).parent if isinstance(found, str) else folder
    stats = [(str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
    # What a worker gets of its host changes nothing about its weights.
    alike = msgspec.structs.replace(config, worker_threads=None, worker_host=None, gpu_memory_utilization=1.0)
    return msgspec.msgpack.encode(alike), files
