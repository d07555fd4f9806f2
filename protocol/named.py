"""Code of a deployment's own, found by its name."""

from __future__ import annotations

import pkgutil
from typing import Any

from protocol.errors import ConfigError


def named(name: str, flag: str) -> Any:
    """What `module:name` names. Raises `ConfigError` that names `flag`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: there is no {name}: {error}") from error
