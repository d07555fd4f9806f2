"""Whether workers can have the ranks that they are to have, found out before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.config import ServeConfig, flag_name, transport_names
from protocol.errors import ConfigError
from protocol.roles import ROLES

_HEADS = ("num_attention_heads", "n_head")
"""Fields of a `config.json` that say how many attention heads there are."""


def check_ranks(config: ServeConfig) -> None:
    """Raises ConfigError that names the option, its value and the limit."""
    sizes = list(_sizes(config))
    if not sizes:
        return
    if "object_store" in transport_names(config):
        refuse_ranks(
            config, "with object_store among --kv-transports: it needs workers within Ray's processes"
        )
    if config.device == "cuda":
        refuse_ranks(config, "with --device cuda: ranks share a KV pool in the host's memory")
    if config.compile == "on":
        refuse_ranks(config, "with --compile on: torch.compile knows nothing of what ranks exchange")
    model = _model_config(config)
    for flag, size in sizes:
        for field in _HEADS:
            count = model.get(field)
            if isinstance(count, int) and count % size:
                raise ConfigError(f"{flag}: {size} does not divide {field} of {config.model}, {count}")


def refuse_ranks(config: ServeConfig, why: str) -> None:
    """Raises ConfigError if any worker is to have several ranks."""
    for flag, size in _sizes(config):
        raise ConfigError(f"{flag}: {size} is above 1, which cannot be {why}")


def _sizes(config: ServeConfig) -> Iterator[tuple[str, int]]:
    for role in ROLES.values():
        if config.num_replicas(role) and config.num_ranks(role) > 1:
            yield flag_name(role.ranks), config.num_ranks(role)


def _model_config(config: ServeConfig) -> dict[str, Any]:
    """What the model's `config.json` says of its decoder; workers tell what is wrong with a missing one."""
    folder = Path(config.model).expanduser()
    try:
        path = folder / "config.json" if folder.is_dir() else _from_hub(config)
        model = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    inner = model.get("text_config") if isinstance(model, dict) else None
    return inner if isinstance(inner, dict) else model if isinstance(model, dict) else {}


def _from_hub(config: ServeConfig) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(config.model, "config.json", revision=config.revision))
