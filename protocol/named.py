"""Finds code of the deployment's own by its name."""

from __future__ import annotations

import pkgutil
from typing import Any

from protocol.errors import ConfigError


def named(name: str, flag: str) -> Any:
    """Import the object that `module:name` names. Raises `ConfigError` that names `flag`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: there is no {name}: {error}") from error
