"""Files that flags name. One that others can change, or a secret that they can read, is refused by flag."""

from __future__ import annotations

from native.ownership import OwnershipError, read_own
from protocol.errors import ConfigError


def read_private(path: str, flag: str) -> bytes:
    """The file's bytes. Raises `ConfigError` where it cannot be read, or others may read or write it."""
    return _read(path, flag, private=True)


def read_trusted(path: str, flag: str) -> bytes:
    """The file's bytes. Raises `ConfigError` where it cannot be read, or others may write it."""
    return _read(path, flag, private=False)


def _read(path: str, flag: str, private: bool) -> bytes:
    try:
        return read_own(path, private=private)
    except OwnershipError as error:
        raise ConfigError(f"{flag}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
