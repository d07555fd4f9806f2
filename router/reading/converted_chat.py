"""Requests of other formats that are converted to a chat, and their names for the chat's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeVar

from protocol.errors import InvalidRequestError
from router.errors import ApiError
from router.openai_types import ChatBody, ChatMessage, ToolCall
from router.reading.prepared import ServedModel

T = TypeVar("T")

_FIELD = re.compile(r"messages\[(\d+)\]\.(?:tool_calls\[(\d+)\]\.function\.)?(.*)")


class ConvertedMessages:
    """The `messages` of a chat, each with the field of the request that it was made from."""

    tool_names: ClassVar[Mapping[str, str]] = {}
    """The request's names for fields of a tool message."""
    call_names: ClassVar[Mapping[str, str]] = {}
    """The request's names for fields of a called function."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._places: list[str] = []
        self._call_places: list[list[str]] = []

    def field(self, name: str) -> str:
        """Return the request's name for a field of the chat's messages."""
        match = _FIELD.fullmatch(name)
        if match is None:
            return name
        number, call, rest = int(match[1]), match[2], match[3]
        if call is not None:
            return f"{self._call_places[number][int(call)]}.{self.call_names.get(rest, rest)}"
        is_result = self.messages[number].role == "tool"
        return f"{self._places[number]}.{self.tool_names.get(rest, rest) if is_result else rest}"

    def _append(self, message: ChatMessage, at: str) -> ChatMessage:
        self.messages.append(message)
        self._places.append(at)
        self._call_places.append([])
        return message

    def _append_call(self, call: ToolCall, at: str) -> None:
        """Append a call to the last message."""
        message = self.messages[-1]
        message.tool_calls = [*(message.tool_calls or ()), call]
        self._call_places[-1].append(at)


def renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that renames fields of the chat by patterns with replacements."""
    patterns = [(re.compile(pattern), own) for pattern, own in names.items()]

    def rename(field: str) -> str:
        for pattern, own in patterns:
            field = pattern.sub(own, field)
        return field

    return rename


class ConvertedChat(NamedTuple):
    """The equivalent chat. `own_field`: the request's name for a field outside the messages."""

    body: ChatBody
    messages: ConvertedMessages
    own_field: Callable[[str], str]

    def read(self, read: Callable[[ChatBody, ServedModel], T], model: ServedModel) -> T:
        """Return the result of `read` for the body. Errors name the request's fields."""
        try:
            return read(self.body, model)
        except (InvalidRequestError, ApiError) as error:
            raise self._renamed(error) from error

    def _renamed(self, error: InvalidRequestError | ApiError) -> InvalidRequestError | ApiError:
        """Return the error with the request's field instead of the chat's."""
        if isinstance(error, InvalidRequestError):
            return InvalidRequestError(self._field(error.field), error.message)
        if error.param is not None:
            own = self._field(error.param)
            if error.message.startswith(error.param):
                error.message = own + error.message.removeprefix(error.param)
            error.param = own
        return error

    def _field(self, name: str) -> str:
        return self.messages.field(self.own_field(name))
