"""Whether workers can have the ranks that they are to have, found out before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from protocol.config import ServeConfig, flag_name, transport_names
from protocol.errors import ConfigError
from protocol.roles import ROLES

_HEADS = ("num_attention_heads", "n_head")
"""Fields of a `config.json` that say how many attention heads there are."""


def check_ranks(config: ServeConfig) -> None:
    """Raises ConfigError that names the option, its value and the limit."""
    if "object_store" in transport_names(config):
        refuse_ranks(
            config, "with object_store among --kv-transports: it needs workers within Ray's processes"
        )
    if config.device == "cuda":
        refuse_ranks(config, "with --device cuda: ranks share a KV pool in the host's memory")
    if config.compile == "on":
        refuse_ranks(config, "with --compile on: torch.compile knows nothing of what ranks exchange")


def check_heads(config: ServeConfig, decoder: Mapping[str, Any]) -> None:
    """The same, of a model whose decoder has such a `config.json`."""
    for flag, size in _sizes(config):
        for field in _HEADS:
            count = decoder.get(field)
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
