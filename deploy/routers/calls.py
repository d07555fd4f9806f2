"""Calls between the launcher and routers in processes of their own, as msgpack over a control socket.

A call names a function of the other process. Its arguments are checked against the function's annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, get_type_hints

import msgspec

from messaging.sockets import ClusterKeys
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from protocol.errors import ProtocolError
from router.server import RouterPlace

MAX_MESSAGE_BYTES = 1024 * 1024

P = ParamSpec("P")


class StartRouter(msgspec.Struct, frozen=True):
    """The first message to a router."""

    config: ServeConfig
    keys: ClusterKeys
    link_host: str
    place: RouterPlace


class KnownWorker(msgspec.Struct, frozen=True):
    incarnation: str
    silence_s: float
    start_up: dict[str, str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of a function. With a number, the caller waits for the `Answer` of this number."""

    name: str
    arguments: msgspec.Raw
    number: int | None = None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int
    value: msgspec.Raw


message_decoder: BoundedDecoder[Call | Answer] = BoundedDecoder(Call | Answer)


def call(function: Callable[Concatenate[Any, P], object], *arguments: P.args, **_: P.kwargs) -> Call:
    """Return the call of a method of the other process."""
    return Call(function.__name__, msgspec.Raw(encode(arguments)))


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def result_decoder(function: Callable[..., object]) -> BoundedDecoder[Any]:
    return BoundedDecoder(get_type_hints(function)["return"])


class Functions:
    """The functions that the other process may call."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions = {each.__name__: (each, _arguments_decoder(each)) for each in functions}

    def run(self, message: Call) -> Any:
        """Call the function. Raises `ProtocolError` for an unknown name or unfit arguments."""
        if message.name not in self._functions:
            raise ProtocolError(f"there is no function {message.name!r}")
        function, decoder = self._functions[message.name]
        return function(*decoder.decode(message.arguments))


def _arguments_decoder(function: Callable[..., Any]) -> BoundedDecoder[Any]:
    hints = get_type_hints(function, include_extras=True)
    kinds = tuple(hints[name] for name in inspect.signature(function).parameters)
    return BoundedDecoder(tuple[kinds])  # type: ignore[valid-type]
