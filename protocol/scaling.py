"""`--autoscale`: the minimum and maximum number of workers of each role that scales by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError
from protocol.roles import ROLES

MAX_WORKERS = 4096
"""The most workers of one role."""
_RANGE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*\Z")

_Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class WorkerRange(msgspec.Struct, frozen=True):
    """The minimum and maximum number of workers of a role."""

    least: _Workers
    most: _Workers

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def parse_autoscale(value: object, flag: str) -> dict[str, WorkerRange]:
    """Parse `prefill=1:4,decode=1:8`, or a mapping of roles to `1:4`. Raises `ConfigError`."""
    if isinstance(value, str):
        pairs = [part.partition("=")[::2] for part in value.split(",") if part.strip()]
    elif isinstance(value, Mapping):
        pairs = [(str(role), str(text)) for role, text in value.items()]
    else:
        pairs = []
    if not pairs:
        raise ConfigError(f"{flag}: must be roles with ranges, as in prefill=1:4,decode=1:8, got {value!r}")
    found: dict[str, WorkerRange] = {}
    for name, text in pairs:
        role = name.strip()
        if role not in ROLES:
            raise ConfigError(f"{flag}: there is no role {role!r}; there are {', '.join(ROLES)}")
        if role in found:
            raise ConfigError(f"{flag}: {role}: is given twice")
        found[role] = _range(text, f"{flag}: {role}")
    return found


def _range(text: str, what: str) -> WorkerRange:
    match = _RANGE.match(text)
    least, most = map(int, match.groups()) if match else (0, 0)
    if not 1 <= least <= most <= MAX_WORKERS:
        raise ConfigError(
            f"{what}: must be LEAST:MOST, whole numbers from 1 to {MAX_WORKERS}, the first not above the "
            f"second, got {text.strip()!r}"
        )
    return WorkerRange(least, most)
