"""A request's tools: their form for the chat template, and the calls that the model may or must make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from protocol.errors import InvalidRequestError
from router.decoding import decode_object
from router.grammars.tool_grammar import Offer
from router.openai_types import ChatBody, NamedTool, Tool
from router.parsing.parameters import Parameters, parameters_of


class ToolChoice(NamedTuple):
    """Whether the answer may call functions, whether it must, and which one if only one is allowed."""

    may_call: bool
    must_call: bool = False
    name: str | None = None

    def several(self, asked: bool | None) -> bool:
        """Return whether an answer may have several calls. If it must call, only if `asked` is true."""
        return self.name is None and (not self.must_call if asked is None else asked)


def tool_choice(body: ChatBody) -> ToolChoice:
    """Return the request's tool choice. Raises `InvalidRequestError`."""
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
    """Return the functions that a grammar lets the answer call; with `name` only that one."""
    return [
        Offer(
            tool.function.name,
            decode_object(tool.function.parameters, f"tools[{index}].function.parameters"),
            bool(tool.function.strict),
        )
        for index, tool in enumerate(tools)
        if name in (None, tool.function.name)
    ]


def known_functions(tools: Sequence[Mapping[str, Any]], with_types: bool) -> dict[str, Parameters]:
    """Return the functions of `plain_tools`, with their parameters' types if the parser needs them."""
    functions = [tool["function"] for tool in tools]
    return {
        each["name"]: parameters_of(each.get("parameters")) if with_types else Parameters()
        for each in functions
    }


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as the chat template reads them. Raises `InvalidRequestError`."""
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
