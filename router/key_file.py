"""The file of API keys: one line of JSON per key, with its hash and its limits. The file does not contain
the keys.

A key is 256 random bits, so a plain SHA-256 reveals nothing of it and is fast enough to compute for each
request.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from messaging.files import read_private
from native.ownership import OwnershipError, open_own
from protocol.config import flag_name
from protocol.errors import ConfigError
from protocol.fields import FieldError, PositiveInt, to_struct
from protocol.server_options import MAX_API_KEYS

FLAG = flag_name("api_key_file")
PREFIX = "tandem-"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. A limit that is not given does not apply; all limits are per router.

    `priority` is the priority of its requests, where the lowest goes first; requests can only ask for less
    urgency themselves. An `operator` may ask for any urgency, inspect the cluster and drain workers.
    """

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9._-]{0,63}\Z")]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    operator: bool = False

    @property
    def has_limits(self) -> bool:
        limits = self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests
        return any(limit is not None for limit in limits)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_key_file(path: str) -> list[KeyEntry]:
    """Read all entries. Raises `ConfigError` with the invalid line, and if other users can read the file."""
    try:
        lines = read_private(path, FLAG).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{FLAG}: {path} is no UTF-8 text") from error
    entries = [
        _entry(line, f"{FLAG}: {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if len(entries) > MAX_API_KEYS:
        raise ConfigError(f"{FLAG}: at most {MAX_API_KEYS} keys, {path} has {len(entries)}")
    for field in ("name", "sha256"):
        _check_unique([getattr(entry, field) for entry in entries], field, path)
    return entries


def _entry(line: str, where: str) -> KeyEntry:
    try:
        return msgspec.json.decode(line, type=KeyEntry)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_unique(values: Sequence[str], field: str, path: str) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{FLAG}: {path}: the {field} {value} is there twice")
        seen.add(value)


def add_key(path: str, **fields: str | int | bool | None) -> str:
    """Make a key, append its entry to the file, which may be new, and return the key, which is stored
    nowhere.

    Raises `ConfigError`, also for a name that exists already.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        entry = to_struct({**given, "sha256": hash_of(key)}, KeyEntry)
    except FieldError as error:
        where = "NAME" if error.field == "name" else flag_name(error.field)
        raise ConfigError(f"{where}: {error.message}") from None
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except OwnershipError as error:
        raise ConfigError(f"{FLAG}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if any(other.name == entry.name for other in read_key_file(path)):
            raise ConfigError(f"{FLAG}: {path} has a key named {entry.name} already: remove its line first")
        size = os.fstat(descriptor).st_size
        begun = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * begun + msgspec.json.encode(entry) + b"\n")
    finally:
        os.close(descriptor)
    return key
