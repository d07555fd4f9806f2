"""Stored responses, which clients may continue, and read page by page: in memory, or in a file that outlives
the router.

Each response is stored with its whole conversation and needs no other one to be continued. The oldest are
deleted when their number or their bytes exceed the limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Raw

from native.ownership import check_own, check_private, open_own
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.logs import RareLog
from router.errors import ApiError
from router.responses.body import Item, ItemPart, ItemText

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0
_SUFFIXES = ("", "-journal", "-wal", "-shm")
DropReason = Literal["full", "failed"]

_TABLE = """
create table if not exists responses (
    number integer primary key autoincrement, id text unique, owner text, size integer, body blob, items blob
)"""
_KEPT = """
select number, sum(size) over newest as total, row_number() over newest as place
from responses window newest as (order by number desc)"""


class StoredResponse(NamedTuple):
    """A stored response: the `body` that clients see, and the conversation's `items`, both JSON."""

    id: str
    owner: str
    body: bytes
    items: bytes


class ResponseStore:
    """A store in SQLite, which several routers may share. Each API key sees only its own responses.

    All methods may wait for a disk or for another router; `get` and `delete` raise `ApiError`.
    """

    def __init__(self, config: ServeConfig, on_drop: Callable[[DropReason], None]) -> None:
        self._most = config.max_stored_responses
        self._most_bytes = config.max_stored_response_bytes
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._log = RareLog(logger)
        path = config.response_store
        try:
            if path is not None:
                _claim(Path(path).absolute())
            self._database = sqlite3.connect(path or ":memory:", LOCK_TIMEOUT_S, check_same_thread=False)
            with self._transaction():
                self._database.execute("pragma synchronous = normal")
                self._database.execute("pragma journal_mode = wal")
                self._database.execute(_TABLE)
        except (OSError, ApiError) as error:
            raise ConfigError(f"--response-store: cannot use {path!r}: {error}") from error

    def put(self, response: StoredResponse) -> bool:
        """Store a response. Return whether it is stored. A failure is logged and counted, not raised."""
        size = len(response.body) + len(response.items)
        if size > self._most_bytes:
            self._on_drop("full")
            return False
        row = (response.id, response.owner, size, response.body, response.items)
        try:
            with self._transaction():
                insert = "insert into responses (id, owner, size, body, items) values (?, ?, ?, ?, ?)"
                self._database.execute(insert, row)
                dropped = self._database.execute(
                    f"delete from responses where number in (select number from ({_KEPT}) "
                    "where total > ? or place > ?)",
                    (self._most_bytes, self._most),
                ).rowcount
        except ApiError as error:
            self._log.warning("response %s could not be stored: %s", response.id, error)
            self._on_drop("failed")
            return False
        for _ in range(dropped):
            self._on_drop("full")
        return True

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        with self._transaction():
            select = "select id, owner, body, items from responses where id = ? and owner = ?"
            row = self._database.execute(select, (response_id, owner)).fetchone()
        return None if row is None else StoredResponse(*row)

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response. Return whether it existed."""
        with self._transaction():
            delete = "delete from responses where id = ? and owner = ?"
            found = self._database.execute(delete, (response_id, owner))
        return found.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction. Raises `ApiError`."""
        try:
            with self._lock, self._database:
                yield
        except sqlite3.Error as error:
            raise ApiError(503, f"stored responses are out of reach: {error}", retry_after_s=1.0) from error


def _claim(path: Path) -> None:
    """Create the file if needed, and check that no other user can access it or SQLite's files next to it.

    An existing file is not opened: closing it again would release this process's locks. Raises OSError.
    """
    check_own(path.parent)
    for suffix in _SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            check_private(path.with_name(path.name + suffix))
    with contextlib.suppress(FileExistsError):
        os.close(open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


def response_store(config: ServeConfig, on_drop: Callable[[DropReason], None]) -> ResponseStore | None:
    """Return the store; None if responses are not kept. Several routers must share a file."""
    if config.max_stored_responses == 0 or (config.router_replicas > 1 and config.response_store is None):
        return None
    return ResponseStore(config, on_drop)


MAX_PAGE = 100
Order = Literal["asc", "desc"]


class _Answered(msgspec.Struct):
    """The part of a response's body that tells how many items of its conversation are its own output."""

    output: list[Raw]


def page_of(response: StoredResponse, after: str | None, limit: int, order: Order) -> bytes:
    """Return a page of the items that the response answered, as JSON: of earlier responses', too.

    An item's id is made from its place, as clients may name none, or several alike. `after`: id of the item
    before the page. Raises `InvalidRequestError`.
    """
    items = _inputs(response)
    ids = [f"item_{response.id.partition('_')[2]}_{number}" for number in range(len(items))]
    rest = list(range(len(items)) if order == "asc" else reversed(range(len(items))))
    if after is not None:
        if after not in ids:
            raise InvalidRequestError("after", f"{after[:64]!r} is no input item of {response.id}")
        rest = rest[rest.index(ids.index(after)) + 1 :]
    shown = [{"id": ids[number], **_shown(items[number])} for number in rest[:limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    page = {"object": "list", "data": shown, "first_id": None, "last_id": None, **ends}
    return msgspec.json.encode({**page, "has_more": len(rest) > limit})


def _inputs(response: StoredResponse) -> Sequence[Raw]:
    items = msgspec.json.decode(response.items, type=list[Raw])
    own = msgspec.json.decode(response.body, type=_Answered).output
    return items[: len(items) - len(own)]


def _shown(raw: Raw) -> dict[str, Any]:
    """Return an item with the fields that OpenAI's clients require."""
    item = msgspec.json.decode(raw, type=Item)
    match item.type:
        case "message":
            part = "output_text" if item.role == "assistant" else "input_text"
            fields: dict[str, Any] = {"role": item.role, "content": _parts(item.content, part)}
        case "reasoning":
            fields = {"summary": item.summary or []}
            if item.content is not None:
                fields["content"] = _parts(item.content, "reasoning_text")
        case "function_call":
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case _:
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            fields = {"call_id": item.call_id, "output": output}
    return {"type": item.type, "status": item.status or "completed", **fields}


def _parts(content: ItemText | None, kind: str) -> list[dict[str, Any]]:
    """Return parts of the kind that belongs to the item, whatever kind of text its client sent."""
    parts = [ItemPart(type=kind, text=content)] if isinstance(content, str) else content or []
    details: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": (part.text or part.refusal or ""), **details} for part in parts]
