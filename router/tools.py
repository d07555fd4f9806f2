"""The tools of a request: what the chat template is told of them, and what the model may do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from protocol.errors import InvalidRequestError
from router.decoding import decode_object
from router.openai_types import ChatBody, NamedTool, Tool
from router.tool_grammar import Offer


class ToolChoice(NamedTuple):
    """Whether the answer may call functions, and whether it must, then which."""

    may_call: bool
    must_call: bool = False
    name: str | None = None

    def several(self, asked: bool | None) -> bool:
        """Whether an answer may have several calls. Where one must come, only if that is `asked` for."""
        return self.name is None and (not self.must_call if asked is None else asked)


def tool_choice(body: ChatBody) -> ToolChoice:
    """Raises `InvalidRequestError`."""
    asked = body.tool_choice
    if not body.tools:
        if asked not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", "only allowed with tools")
        return ToolChoice(False)
    if isinstance(asked, NamedTool):
        name = asked.function.name
        if all(tool.function.name != name for tool in body.tools):
            raise InvalidRequestError("tool_choice", f"there is no tool {name!r}")
        return ToolChoice(True, True, name)
    if asked not in (None, "none", "auto", "required"):
        reason = f"must be 'none', 'auto', 'required' or a function, got {asked!r}"
        raise InvalidRequestError("tool_choice", reason)
    return ToolChoice(asked != "none", asked == "required")


def offers(tools: Sequence[Tool], name: str | None) -> list[Offer]:
    """What a grammar lets the answer call; with `name` that function alone."""
    return [
        Offer(
            tool.function.name,
            decode_object(tool.function.parameters, f"tools[{index}].function.parameters"),
            bool(tool.function.strict),
        )
        for index, tool in enumerate(tools)
        if name in (None, tool.function.name)
    ]


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
    names.add(function.name)
    fields: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    parameters = decode_object(function.parameters, f"{at}function.parameters")
    if parameters is not None:
        fields["parameters"] = parameters
    return {"type": "function", "function": fields}
