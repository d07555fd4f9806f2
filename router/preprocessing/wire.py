"""Messages between the router and the preprocessor, on one connection per task.

The router sends a `TaskCall` and the task's argument, each preceded by its length. The answer is a byte
`ACCEPTED`, a byte for how the task ended, and its outcome: a result or a `TaskError`, preceded by its
length, or the number of a signal. Then the connection ends.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.reading.served import ServedModel

LENGTH = struct.Struct("!Q")
ACCEPTED = b"."
RESULT, REFUSED, DIED = b"+", b"-", b"!"

GRAMMAR = "grammar"
"""The task that compiles a grammar; the other tasks read bodies."""


class Setup(msgspec.Struct, frozen=True):
    """The preprocessor's configuration, and the files of its `Tokenizer`."""

    config: ServeConfig
    tokenizer_json: str
    tokenizer_settings: dict[str, Any]


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def content_of(frame: bytes) -> bytes | None:
    """Return a frame's content, None if it was cut off or has extra bytes."""
    content = frame[LENGTH.size :]
    return content if LENGTH.pack(len(content)) == frame[: LENGTH.size] else None


class TaskCall(msgspec.Struct, frozen=True, array_like=True):
    """A task's name, its limit of CPU time, and the facts that it needs in addition to its argument."""

    task: str
    cpu_s: float
    details: bytes = b""


class ReadingDetails(msgspec.Struct, frozen=True, array_like=True):
    """The model for which a body is read, and the items of the `earlier` response that it continues."""

    model: ServedModel
    earlier: bytes | None = None


class TaskError(msgspec.Struct, frozen=True, array_like=True):
    """An `InvalidRequestError` if `status` is 0, else an `ApiError`."""

    status: int
    message: str
    param: str | None
    code: str | None = None

    @classmethod
    def from_error(cls, error: InvalidRequestError | ApiError) -> TaskError:
        if isinstance(error, InvalidRequestError):
            return cls(0, error.message, error.field)
        return cls(error.status, error.message, error.param, error.code)

    def to_error(self) -> InvalidRequestError | ApiError:
        if not self.status:
            return InvalidRequestError(self.param or "", self.message)
        return ApiError(self.status, self.message, param=self.param, code=self.code)
