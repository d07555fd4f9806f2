"""Who may use the server, and how much: the keys of --api-key and --api-key-file, with what each has used."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import NoReturn

from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.errors import ApiError
from router.journal import ANYBODY, Generation
from router.key_file import KeyEntry, hash_of, read_key_file
from router.metrics import Limit, Metrics

logger = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
MAX_PRIORITY = 2**31 - 1


class Minute:
    """What was used of an allowance per minute: a bucket that leaks as much in a minute as it holds.

    So a minute's worth can come at once, and after that as much as leaks. What comes may fill it beyond its
    brim, and then nothing more is taken until that has leaked.
    """

    def __init__(self) -> None:
        self._used, self._at = 0.0, time.monotonic()

    def wait_s(self, per_minute: int) -> float:
        """How long until it has room; 0 now."""
        now = time.monotonic()
        self._used = max(0.0, self._used - (now - self._at) * per_minute / 60)
        self._at = now
        return max(0.0, self._used + 1 - per_minute) * 60 / per_minute

    def add(self, amount: float) -> None:
        self._used += amount


class ApiKey:
    """One key with what it has used; `entry` changes when the file does. For the event loop alone."""

    def __init__(self, entry: KeyEntry, metrics: Metrics) -> None:
        self.entry = entry
        self._metrics = metrics
        self._running = 0
        self._requests, self._tokens = Minute(), Minute()

    def check(self, num_requests: int = 1) -> None:
        """Raises `ApiError` 429 where it may not start so many requests now."""
        most = self.entry.concurrent_requests
        if most is not None and self._running + num_requests > most:
            self._refuse("key_concurrent", f"may have {most} requests under way", 1.0)
        self._check_minute("key_requests", self._requests, self.entry.requests_per_minute, "requests")
        self._check_minute("key_tokens", self._tokens, self.entry.tokens_per_minute, "tokens")

    def begin(self, generation: Generation) -> None:
        """It uses its requests and prompt tokens, and gets the key's priority. Raises as `check` does."""
        self.check(len(generation.requests))
        self._running += len(generation.requests)
        self._requests.add(len(generation.requests))
        prompts = {id(choice.prompt): choice.prompt for choice in generation.choices}
        self._tokens.add(sum(len(prompt.token_ids) for prompt in prompts.values()))
        generation.key = self.entry.name
        own = generation.priority if self.entry.operator else max(generation.priority, 0)
        generation.priority = max(-MAX_PRIORITY, min(self.entry.priority + own, MAX_PRIORITY))

    def end(self, generation: Generation) -> None:
        """It uses the tokens that have come."""
        self._running -= len(generation.requests)
        self._tokens.add(sum(choice.num_tokens for choice in generation.choices))

    def _check_minute(self, limit: Limit, used: Minute, per_minute: int | None, unit: str) -> None:
        if per_minute is not None and (wait_s := used.wait_s(per_minute)) > 0:
            self._refuse(limit, f"may use {per_minute} {unit} a minute", wait_s)

    def _refuse(self, limit: Limit, what: str, wait_s: float) -> NoReturn:
        self._metrics.refused(limit)
        message = f"the API key {self.entry.name} {what}, as --api-key-file says"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)


class ApiKeys:
    """Finds keys by their hash, so that no comparison takes longer for a better guess.

    Those of --api-key are called by their place, have no limits, and are operators. The file is read anew
    when it changes; where it cannot be, that is counted and logged, and the keys stay what they were. Raises
    `ConfigError`.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._path = config.api_key_file
        self.are_needed = config.needs_api_key
        self.anybody = self._made(KeyEntry(name=ANYBODY, sha256="", operator=True))
        """Who sends a request where no key is needed."""
        given = [
            KeyEntry(name=str(index), sha256=hash_of(key), operator=True)
            for index, key in enumerate(config.api_keys)
        ]
        self._given = {entry.sha256: self._made(entry) for entry in given}
        self._keys = dict(self._given)
        self._version = self._look()
        self._looked_at = time.monotonic()
        if self._path is not None:
            self._install(read_key_file(self._path))

    def find(self, authorization: str) -> ApiKey | None:
        """Whose header this is."""
        scheme, _, token = authorization.partition(" ")
        return self._keys.get(hash_of(token.strip())) if scheme.lower() == "bearer" else None

    def reload(self) -> None:
        """Read the file if it has changed. To be called often."""
        now = time.monotonic()
        if self._path is None or now - self._looked_at < RELOAD_INTERVAL_S:
            return
        self._looked_at = now
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._install(read_key_file(self._path))
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            self._metrics.keys_reloaded("failed")
        else:
            logger.info("%d API keys were read from %s", len(self._keys) - len(self._given), self._path)
            self._metrics.keys_reloaded("ok")

    def _made(self, entry: KeyEntry) -> ApiKey:
        return ApiKey(entry, self._metrics)

    def _install(self, entries: Iterable[KeyEntry]) -> None:
        """Who was there before goes on with what it has used."""
        known = {key.entry.name: key for key in self._keys.values()}
        keys = dict(self._given)
        for entry in entries:
            key = known.get(entry.name) or self._made(entry)
            key.entry = entry
            keys[entry.sha256] = key
        self._keys = keys

    def _look(self) -> tuple[int, int, int] | None:
        """What differs once the file was changed, or another one took its place."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ctime_ns, status.st_size, status.st_ino
