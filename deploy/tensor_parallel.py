"""Checks, before anything is started, whether workers can have the configured ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from protocol.config import ServeConfig, flag_name, transport_names
from protocol.errors import ConfigError
from protocol.roles import ROLES

_HEADS = ("num_attention_heads", "n_head")
"""Fields of a `config.json` with the number of attention heads."""


def check_ranks(config: ServeConfig) -> None:
    """Raise `ConfigError`, which names the option, its value and the limit, if another option excludes
    ranks.
    """
    if "object_store" in transport_names(config):
        refuse_ranks(
            config, "with object_store among --kv-transports: it needs workers within Ray's processes"
        )
    if config.device == "cuda":
        refuse_ranks(config, "with --device cuda: ranks share a KV pool in the host's memory")
    if config.compile == "on":
        refuse_ranks(config, "with --compile on: torch.compile knows nothing of what ranks exchange")


def check_heads(config: ServeConfig, decoder: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the ranks do not divide the attention heads in the decoder's `config.json`."""
    for flag, size in _sizes(config):
        for field in _HEADS:
            count = decoder.get(field)
            if isinstance(count, int) and count % size:
                raise ConfigError(f"{flag}: {size} does not divide {field} of {config.model}, {count}")


def refuse_ranks(config: ServeConfig, why: str) -> None:
    """Raise `ConfigError` if any worker is to have several ranks."""
    for flag, size in _sizes(config):
        raise ConfigError(f"{flag}: {size} is above 1, which cannot be {why}")


def _sizes(config: ServeConfig) -> Iterator[tuple[str, int]]:
    for role in ROLES.values():
        if config.num_replicas(role) and config.num_ranks(role) > 1:
            yield flag_name(role.ranks), config.num_ranks(role)
