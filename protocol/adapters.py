"""LoRA adapters of the deployment's model, as processes name them to each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]

MAX_ADAPTERS = 4096
"""The most adapters that a deployment has at one time."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter: `name` is its name in requests, `path` its folder on each worker's host, `digest`
    identifies its content.

    KV belongs to the content: adapters with the same content share KV, whatever their names.
    """

    name: AdapterName
    path: AdapterPath
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


def parse_lora_modules(value: object, flag: str) -> dict[str, str]:
    """Return absolute folders by name, from `sql=/adapters/sql,...`, a list of these, or a mapping."""
    if isinstance(value, Mapping):
        pairs = [(str(name), str(path)) for name, path in value.items()]
    else:
        texts = value if isinstance(value, list | tuple) else str(value).split(",")
        pairs = [_pair(str(text), flag) for text in texts]
    found: dict[str, str] = {}
    for name, path in pairs:
        if not 1 <= len(name) <= 256:
            raise ConfigError(f"{flag}: a name must have 1 to 256 characters, got {name[:300]!r}")
        if name in found:
            raise ConfigError(f"{flag}: {name}: is given twice")
        found[name] = str(Path(path).expanduser().absolute())
    if not 1 <= len(found) <= MAX_ADAPTERS:
        raise ConfigError(f"{flag}: must be from 1 to {MAX_ADAPTERS} adapters, got {len(found)}")
    return found


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, _, path = text.strip().partition("=")
    if not name or not path:
        raise ConfigError(f"{flag}: must be names with folders, as in sql=/adapters/sql, got {text!r}")
    return name, path
