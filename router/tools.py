"""The tools of a request: what the chat template is told of them, and what the model may do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import InvalidRequestError
from router.decoding import decode_object
from router.openai_types import ChatBody, NamedTool, Tool


def may_call(body: ChatBody) -> bool:
    """Whether the answer may call a function. Raises `InvalidRequestError` for other choices."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", "only allowed with tools")
        return False
    if choice == "none":
        return False
    if choice == "required" or isinstance(choice, NamedTool):
        raise InvalidRequestError(
            "tool_choice", "to demand a call is not supported: only 'auto' and 'none' are"
        )
    if choice not in (None, "auto"):
        raise InvalidRequestError("tool_choice", f"must be 'auto' or 'none', got {choice!r}")
    return True


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For the chat template. Raises `InvalidRequestError`."""
    names: set[str] = set()
    return [_plain(tool, f"tools[{index}].", names) for index, tool in enumerate(tools)]


def _plain(tool: Tool, at: str, names: set[str]) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function":
        raise InvalidRequestError(f"{at}type", f"must be 'function', got {tool.type!r}")
    if function.name in names:
        raise InvalidRequestError(f"{at}function.name", f"{function.name!r} is there twice")
    if function.strict:
        raise InvalidRequestError(f"{at}function.strict", "is not supported")
    names.add(function.name)
    fields: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    parameters = decode_object(function.parameters, f"{at}function.parameters")
    if parameters is not None:
        fields["parameters"] = parameters
    return {"type": "function", "function": fields}
