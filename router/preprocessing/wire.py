"""Messages between the router and the preprocessor, on one connection for each task.

The router sends a `TaskCall` and the task's argument, each after its length. The answer is a byte
`ACCEPTED`, a byte that tells how the task ended, and its outcome: a result or a `TaskError` after its length,
or the number of a signal. Then the connection ends.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.served import ServedModel

LENGTH = struct.Struct("!Q")
ACCEPTED = b"."
RESULT, REFUSED, DIED = b"+", b"-", b"!"

GRAMMAR = "grammar"
"""The task that compiles; the others read bodies."""


class Setup(msgspec.Struct, frozen=True):
    """The preprocessor's configuration, and the files of its `Tokenizer`."""

    config: ServeConfig
    tokenizer_json: str
    tokenizer_settings: dict[str, Any]


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def content_of(frame: bytes) -> bytes | None:
    """None where it was cut off, or something was added."""
    content = frame[LENGTH.size :]
    return content if LENGTH.pack(len(content)) == frame[: LENGTH.size] else None


class TaskCall(msgspec.Struct, frozen=True, array_like=True):
    """The name of a task, the CPU time that it may take, and what else it has to know than its argument."""

    task: str
    cpu_s: float
    details: bytes = b""


class ReadingDetails(msgspec.Struct, frozen=True, array_like=True):
    """The model for which a body is read, and the items of the `earlier` response that it continues."""

    model: ServedModel
    earlier: bytes | None = None


class TaskError(msgspec.Struct, frozen=True, array_like=True):
    """An `InvalidRequestError` where `status` is 0, else an `ApiError`."""

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
