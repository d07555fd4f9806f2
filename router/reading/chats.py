"""The reading of a chat's messages and tools: its prompt, and the parts that its answer may have."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router import openai_types as types
from router.decoding import decode_object
from router.errors import ApiError
from router.grammars.lark import Spelling
from router.grammars.structured_outputs import (
    AskedGrammar,
    Calls,
    Grammar,
    GrammarRequest,
    asked_grammar,
    requested_grammar,
)
from router.grammars.tool_grammar import OfferedFunction, after_thinking, tool_grammar
from router.parsing.formats import (
    MARKERS,
    TOOL_FORMATS,
    Parsing,
    ToolFormat,
    name_of,
    reasoning_format,
    tool_format,
)
from router.parsing.parameters import Parameters, parameters_of
from router.parsing.reasoning import HARMONY, ThinkingBudget
from router.reading.prepared import ServedModel
from router.text.chat_template import ChatTemplate, plain_messages, text_of
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOOLS_UNSEEN = "the model's chat template does not tell the model of tools"
_NO_TEMPLATE = (
    "the model has no chat template (--chat-template FILE gives it one; /v1/completions needs none)"
)


class ToolChoice(NamedTuple):
    """Whether the answer may call functions, whether it must, and which one if only one is allowed."""

    may_call: bool
    must_call: bool = False
    name: str | None = None

    def several(self, asked: bool | None) -> bool:
        """Return whether an answer may have several calls; if it must call, only if `asked` is true."""
        return self.name is None and (not self.must_call if asked is None else asked)


def tool_choice(body: types.ChatBody) -> ToolChoice:
    """Return the request's tool choice. Raises `InvalidRequestError`."""
    asked = body.tool_choice
    if not body.tools:
        if asked not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", "only allowed with tools")
        return ToolChoice(False)
    if isinstance(asked, types.NamedTool):
        name = asked.function.name
        if all(tool.function.name != name for tool in body.tools):
            raise InvalidRequestError("tool_choice", f"there is no tool {name!r}")
        return ToolChoice(True, True, name)
    if asked not in (None, "none", "auto", "required"):
        reason = f"must be 'none', 'auto', 'required' or a function, got {asked!r}"
        raise InvalidRequestError("tool_choice", reason)
    return ToolChoice(asked != "none", asked == "required")


class Chat(NamedTuple):
    """A chat that was read. `parsing` None: the answer can only be content."""

    prompt: str
    parsing: Parsing | None
    grammar: AskedGrammar | None = None
    warning: str | None = None
    """Warning about a part of the request that has no effect."""


class Chats:
    """A reader of chats for the model, which has one format for tool calls and one for reasoning."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template, self._tool_template = tokenizer.chat_template, tokenizer.tool_template
        self._tools = tool_format(config.tool_call_parser, _source(self._tool_template))
        self._reasoning = reasoning_format(config.reasoning_parser, _source(self._template))
        formats = (self._tools, self._reasoning)
        self._is_harmony = any(each is not None and each.is_harmony for each in formats)
        self._variables = config.default_chat_template_kwargs or {}
        self._takes_tools = config.tool_call_parser != "none"
        if self._template is not None and not self._template.traits.shows_user:
            logger.warning("the chat template does not show what the user says")
        if self.has_template and self._takes_tools and not self._shows_tools:
            logger.warning("%s: it calls none unless tool_choice demands it", TOOLS_UNSEEN)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def has_tools(self) -> bool:
        return self._tools is not None and self._shows_tools

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None

    @property
    def _shows_tools(self) -> bool:
        return self._tool_template is not None and self._tool_template.traits.shows_tools

    def read(self, body: types.ChatBody) -> Chat:
        """Read a chat's body. Raises `InvalidRequestError`."""
        choice = tool_choice(body)
        with_tools = choice.may_call
        messages, offered = plain_messages(body.messages), plain_tools(body.tools or ())
        template = self._chosen(with_tools)
        tools = self._format_of(choice)
        prompt = self._render(template, body, messages, offered if with_tools else None)
        marks = None if self._reasoning is None else self._reasoning.marks
        if marks is None and body.thinking_token_budget is not None:
            reason = "the model's chat template shows no known way to think (--reasoning-parser)"
            raise InvalidRequestError("thinking_token_budget", reason)
        warning = f"tools: {TOOLS_UNSEEN}" if with_tools and not self._shows_tools else None
        asked = asked_grammar(body)
        if tools is None and marks is None:
            return Chat(prompt, None, grammar=asked, warning=warning)
        continued = text_of(messages[-1]["content"]) if body.continue_final_message else None
        is_open = marks is not None and marks.are_open(prompt, continued)
        parsing = Parsing(
            tools=name_of(tools) if tools is not None and asked is None else None,
            known=known_functions(offered, tools is not None and tools.has_types),
            one_call=not (choice.several(body.parallel_tool_calls) and template.traits.several_calls),
            must_call=choice.must_call,
            is_harmony=self._is_harmony,
            marks=marks,
            is_open=is_open,
            is_exact=asked is not None,
        )
        calls = None if tools is None else _constrained_calls(body, choice, not parsing.one_call)
        thinks = marks is not None or self._is_harmony
        grammar = asked_grammar(body, calls, is_open if thinks else None)
        return Chat(prompt, parsing, grammar, warning)

    def thinking(self, budget: int | None, parsing: Parsing | None) -> ThinkingBudget | None:
        if budget is None or parsing is None or parsing.marks is None:
            return None
        end = self._tokenizer.encode(parsing.marks.end, add_special_tokens=False)
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return ThinkingBudget(budget, parsing.marks, parsing.is_open, end, decode)

    def _chosen(self, with_tools: bool) -> ChatTemplate:
        template = self._tool_template if with_tools else self._template
        if template is None:
            raise InvalidRequestError("messages", _NO_TEMPLATE)
        return template

    def _format_of(self, choice: ToolChoice) -> ToolFormat | None:
        """Return the format of the answer's calls; None if it has no calls.

        If a call is required, a grammar enforces a format even if the template shows no format.
        """
        if not choice.may_call or self._tools is not None:
            return self._tools if choice.may_call else None
        if not self._takes_tools:
            raise InvalidRequestError("tools", "this server takes none (--tool-call-parser none)")
        if choice.must_call:
            is_harmony = self._reasoning is not None and self._reasoning.is_harmony
            return TOOL_FORMATS["openai" if is_harmony else "hermes"]
        if self._shows_tools:
            raise InvalidRequestError(
                "tools", "the model's chat template shows no known way to call them (--tool-call-parser)"
            )
        return None

    @property
    def constant_grammars(self) -> list[AskedGrammar]:
        """Return grammars that many requests ask for with the same fields."""
        wanted = types.ResponseFormat(type="json_object")
        structured = types.StructuredOutputs(json_object=True)
        starts = (None, False, True) if self._is_harmony or self.has_reasoning else (None,)
        requests = [GrammarRequest(wanted, is_open=is_open) for is_open in starts]
        requests += [GrammarRequest(structured_outputs=structured, is_open=is_open) for is_open in starts]
        return [request.asked() for request in requests]

    def grammar(self, request: GrammarRequest) -> Grammar:
        """Return the grammar of the answer or its calls, after its thinking. Raises `InvalidRequestError`."""
        asked, calls = requested_grammar(request, self._tokenizer.special_ids), request.calls
        marks = None
        if request.is_open is not None:
            marks = HARMONY if self._is_harmony or self._reasoning is None else self._reasoning.marks
        spelling = Spelling(MARKERS, self._tokenizer.token_id)
        if calls is None:
            assert asked is not None
            if marks is None:
                return asked
            return asked._replace(text=after_thinking(asked.text, spelling, marks, bool(request.is_open)))
        if asked is not None:
            raise InvalidRequestError(
                asked.field, "not together with strict functions or a call that must be"
            )
        tools = self._format_of(ToolChoice(True, calls.must_call, calls.name))
        assert tools is not None
        text = tool_grammar(
            tools.form(_source(self._tool_template)),
            offers(calls.tools, calls.name),
            spelling,
            demanded=calls.must_call,
            several=calls.several,
            marks=marks,
            is_open=bool(request.is_open),
        )
        return Grammar(text, "tools")

    def render(self, body: types.TokenizeBody) -> str:
        """Return the prompt only."""
        messages, tools = plain_messages(body.messages or ()), plain_tools(body.tools or ())
        return self._render(self._chosen(bool(tools)), body, messages, tools or None)

    def _render(
        self,
        template: ChatTemplate,
        body: types.ChatBody | types.TokenizeBody,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> str:
        continues = bool(body.continue_final_message)
        own = decode_object(body.chat_template_kwargs, "chat_template_kwargs") or {}
        if isinstance(body, types.ChatBody) and body.reasoning_effort is not None:
            own.setdefault("reasoning_effort", body.reasoning_effort)
        variables = {**self._variables, **own}
        if tools is not None:
            variables["tools"] = tools
        return template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=variables,
        )


def _source(template: ChatTemplate | None) -> str:
    return "" if template is None else template.source


def _constrained_calls(body: types.ChatBody, choice: ToolChoice, several: bool) -> Calls | None:
    """Return the constraint on the answer's calls; None if calls are forbidden or unconstrained."""
    tools = body.tools or []
    if not choice.must_call and not any(tool.function.strict for tool in tools):
        return None
    return Calls(tools, choice.must_call, several, choice.name)


def offers(tools: Sequence[types.Tool], name: str | None) -> list[OfferedFunction]:
    """Return the functions that a grammar lets the answer call: all, or the one with this `name`."""
    return [
        OfferedFunction(
            tool.function.name,
            decode_object(tool.function.parameters, f"tools[{index}].function.parameters"),
            bool(tool.function.strict),
        )
        for index, tool in enumerate(tools)
        if name in (None, tool.function.name)
    ]


def known_functions(tools: Sequence[Mapping[str, Any]], with_types: bool) -> dict[str, Parameters]:
    """Return the functions of `plain_tools` by name, with parameter types if the parser needs these."""
    functions = [tool["function"] for tool in tools]
    return {
        each["name"]: parameters_of(each.get("parameters")) if with_types else Parameters()
        for each in functions
    }


def plain_tools(tools: Sequence[types.Tool]) -> list[dict[str, Any]]:
    """Return the tools in the form that the chat template reads. Raises `InvalidRequestError`."""
    names: set[str] = set()
    return [_plain_tool(tool, f"tools[{index}].", names) for index, tool in enumerate(tools)]


def _plain_tool(tool: types.Tool, at: str, names: set[str]) -> dict[str, Any]:
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


T = TypeVar("T")

_FIELD = re.compile(r"messages\[(\d+)\]\.(?:tool_calls\[(\d+)\]\.function\.)?(.*)")


class ConvertedMessages:
    """The `messages` of a chat, each with the field of the request that it was made from."""

    tool_names: ClassVar[Mapping[str, str]] = {}
    """The request's names for fields of a tool message."""
    call_names: ClassVar[Mapping[str, str]] = {}
    """The request's names for fields of a called function."""

    def __init__(self) -> None:
        self.messages: list[types.ChatMessage] = []
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

    def _append(self, message: types.ChatMessage, at: str) -> types.ChatMessage:
        self.messages.append(message)
        self._places.append(at)
        self._call_places.append([])
        return message

    def _append_call(self, call: types.ToolCall, at: str) -> None:
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

    body: types.ChatBody
    messages: ConvertedMessages
    own_field: Callable[[str], str]

    def read(self, read: Callable[[types.ChatBody, ServedModel], T], model: ServedModel) -> T:
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
