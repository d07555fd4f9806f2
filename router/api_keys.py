"""The API keys of --api-key and --api-key-file with their limits and use, and the key file itself."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from messaging.files import read_private
from native.ownership import OwnershipError, open_own
from protocol.config import ServeConfig, flag_name
from protocol.errors import ConfigError
from protocol.fields import FieldError, PositiveInt, to_struct
from protocol.server_options import MAX_API_KEYS
from router.errors import ApiError
from router.observe.metrics import Limit, Metrics
from router.requests.journal import NO_KEY, Generation, LiveRequest

logger = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
MAX_PRIORITY = 2**31 - 1


class LeakyBucket:
    """The use of an allowance per minute: a leaky bucket that holds, and leaks, one minute's allowance.

    The whole allowance can be used at once; after that, use is limited by the leak. One use may overfill the
    bucket; the next one is admitted only after the excess has leaked.
    """

    def __init__(self) -> None:
        self._used, self._at = 0.0, time.monotonic()

    def wait_s(self, per_minute: int | None, own: float = 0.0) -> float:
        """Return the seconds until the bucket, not counting `own` use, has room for one unit."""
        if per_minute is None:
            return 0.0
        self._leak(per_minute)
        return max(0.0, self._used - own + 1 - per_minute) * 60 / per_minute

    def fill(self, amount: float, per_minute: int | None) -> None:
        """Add use. A negative `amount` takes use back."""
        self._leak(per_minute)
        self._used = 0.0 if per_minute is None else max(0.0, self._used + amount)

    def _leak(self, per_minute: int | None) -> None:
        now = time.monotonic()
        self._used = max(0.0, self._used - (now - self._at) * (per_minute or 0) / 60)
        self._at = now


class ApiKey:
    """An API key with its use. Methods run on the event loop; a thread sets `entry` when the file changes."""

    def __init__(self, entry: KeyEntry, metrics: Metrics) -> None:
        self.entry = entry
        self._metrics = metrics
        self._running = 0
        self._requests, self._tokens = LeakyBucket(), LeakyBucket()

    def admit(self) -> Admission:
        """Count one request against the limits. Raises `ApiError` 429 if they have no room."""
        self.take_requests(1)
        return Admission(self)

    def take_requests(self, number: int, own: int = 0) -> None:
        """Count `number` more sequences of an HTTP request that has counted `own`. Raises `ApiError` 429."""
        most = self.entry.concurrent_requests
        if most is not None and self._running + number > most:
            self._refuse("key_concurrent", f"may have {most} requests under way", 1.0)
        per_minute = self.entry.requests_per_minute
        self._check_minute("key_requests", self._requests.wait_s(per_minute, own), per_minute, "requests")
        self._running += number
        self._requests.fill(number, per_minute)

    def check_tokens(self) -> None:
        """Raise `ApiError` 429 if the key may use no token now."""
        per_minute = self.entry.tokens_per_minute
        self._check_minute("key_tokens", self._tokens.wait_s(per_minute), per_minute, "tokens")

    def add_tokens(self, number: int) -> None:
        """Count tokens. A negative `number` takes tokens back."""
        self._tokens.fill(number, self.entry.tokens_per_minute)

    def end_requests(self, number: int) -> None:
        self._running -= number

    def _check_minute(self, limit: Limit, wait_s: float, per_minute: int | None, unit: str) -> None:
        if wait_s > 0:
            self._refuse(limit, f"may use {per_minute} {unit} a minute", wait_s)

    def _refuse(self, limit: Limit, what: str, wait_s: float) -> NoReturn:
        self._metrics.count("requests_refused_total", limit)
        message = f"the API key {self.entry.name} {what}, as --api-key-file says"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)


class Admission:
    """An admitted HTTP request with its share of the key's limits, which it holds until `end`."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self._num_requests = 1
        self._reserved = 0
        self._generation: Generation | None = None

    def reserve(self, generation: Generation) -> None:
        """Reserve all sequences and the most tokens that they can use; set the generation's priority.

        Raises `ApiError` 429 if nothing of the key's limit is left; a request may use more than is left.
        """
        key, entry = self.key, self.key.entry
        key.check_tokens()
        more = len(generation.requests) - self._num_requests
        if more > 0:
            key.take_requests(more, own=self._num_requests)
            self._num_requests += more
        self._reserved = _prompt_tokens(generation.requests)
        self._reserved += sum(request.sampling.max_tokens for request in generation.requests)
        key.add_tokens(self._reserved)
        self._generation = generation
        generation.key = entry.name
        own = generation.priority if entry.operator else max(generation.priority, 0)
        generation.priority = max(-MAX_PRIORITY, min(entry.priority + own, MAX_PRIORITY))

    def end(self) -> None:
        """Release what was reserved but not used: tokens not generated, and prompts not sent to a worker."""
        self.key.end_requests(self._num_requests)
        if self._generation is not None:
            placed = [request for request in self._generation.requests if request.assignment is not None]
            used = _prompt_tokens(placed) + sum(choice.num_tokens for choice in self._generation.choices)
            self.key.add_tokens(used - self._reserved)


def _prompt_tokens(requests: Sequence[LiveRequest]) -> int:
    """Count each prompt's tokens once, also if several choices share it."""
    prompts = {id(request.choice.prompt): request.choice.prompt for request in requests}
    return sum(len(prompt.token_ids) for prompt in prompts.values())


class ApiKeys:
    """The keys by hash, so that the time of a look-up tells nothing about a key. Raises `ConfigError`.

    The keys of --api-key are named by their index, have no limits, and are operators. The file is read again
    when it changes; a failure is counted and logged, and the keys stay unchanged.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._path = config.api_key_file
        self.are_needed = config.needs_api_key
        self.anonymous = self._made(KeyEntry(name=NO_KEY, sha256="", operator=True))
        """Key of all requests if the server needs no key."""
        configured = [
            KeyEntry(name=str(index), sha256=hash_of(key), operator=True)
            for index, key in enumerate(config.api_keys)
        ]
        self._configured = {entry.sha256: self._made(entry) for entry in configured}
        self._keys = dict(self._configured)
        self._version = self._file_version()
        self._looked_at = time.monotonic()
        self._check: threading.Thread | None = None
        if self._path is not None:
            entries = read_key_file(self._path)
            self._install(entries)
            if config.router_replicas > 1 and any(entry.has_limits for entry in entries):
                logger.warning("API keys' limits are those of each of the %d routers", config.router_replicas)

    def find(self, token: str) -> ApiKey | None:
        """Return the key that a client gave; None if it is unknown."""
        return self._keys.get(hash_of(token))

    def reload(self) -> None:
        """Read the file in a thread if it has changed, since a disk may be slow. Call often."""
        now = time.monotonic()
        if self._path is None or now - self._looked_at < RELOAD_INTERVAL_S:
            return
        if self._check is None or not self._check.is_alive():
            self._looked_at = now
            self._check = threading.Thread(target=self.check_file, name="api-keys", daemon=True)
            self._check.start()

    def check_file(self) -> None:
        version = self._file_version()
        if self._path is None or version == self._version:
            return
        self._version = version
        try:
            self._install(read_key_file(self._path))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            self._metrics.count("api_key_reloads_total", "failed")
        else:
            logger.info("%d API keys were read from %s", len(self._keys) - len(self._configured), self._path)
            self._metrics.count("api_key_reloads_total", "ok")

    def _made(self, entry: KeyEntry) -> ApiKey:
        return ApiKey(entry, self._metrics)

    def _install(self, entries: Iterable[KeyEntry]) -> None:
        """Replace the file's keys. A key with a known name keeps its use."""
        known = {key.entry.name: key for key in self._keys.values()}
        keys = dict(self._configured)
        for entry in entries:
            key = known.get(entry.name) or self._made(entry)
            key.entry = entry
            keys[entry.sha256] = key
        self._keys = keys

    def _file_version(self) -> tuple[int, int, int] | None:
        """Return values that differ after the file has changed or was replaced."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ctime_ns, status.st_size, status.st_ino


FLAG = flag_name("api_key_file")
PREFIX = "tandem-"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An API key of the file. Limits hold per router; None: no limit.

    `priority`: priority of its requests, the lowest first; requests can only lower their urgency. An
    `operator` may ask for any urgency, inspect the cluster and drain workers.
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
    """Read all entries. Raises `ConfigError` that names a bad line, or if other users can read the file."""
    try:
        lines = read_private(path, FLAG).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{FLAG}: {path} is no UTF-8 text") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    entries = [_entry(line, f"{FLAG}: {path}, line {number}") for number, line in numbered]
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
    """Make a key, append its entry to the file and return it. Raises `ConfigError`, also for a known name."""
    key = PREFIX + secrets.token_urlsafe(32)
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        entry = to_struct({**present, "sha256": hash_of(key)}, KeyEntry)
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
        _append_line(descriptor, msgspec.json.encode(entry) + b"\n")
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot write {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return key


def _append_line(descriptor: int, line: bytes) -> None:
    """Append a whole line, or leave the file as it was. Raises OSError."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
