"""From a chat's messages and tools to the prompt, and to what is to be found in the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from router.decoding import decode_object
from router.lark import Spelling
from router.messages import plain_messages
from router.openai_types import ChatBody, TokenizeBody
from router.parsing.formats import MARKERS, Parsing, reasoning_format, tool_format
from router.parsing.reasoning import HARMONY, Marks
from router.structured_outputs import Grammar, requested_grammar
from router.thinking import ThinkingBudget
from router.tokenizer import Tokenizer
from router.tool_grammar import after_thinking, tool_grammar
from router.tools import ToolChoice, offers, plain_tools, tool_choice


class Chat(NamedTuple):
    """`parsing` is None where the answer can have nothing but content."""

    prompt: str
    parsing: Parsing | None
    thinking: ThinkingBudget | None = None
    grammar: Grammar | None = None


class Chats:
    """Of one model, which writes calls and reasoning in one way."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = template = tokenizer.chat_template
        self._tools = tool_format(config.tool_call_parser, template.source)
        self._reasoning = reasoning_format(config.reasoning_parser, template.source)

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None

    def read(self, body: ChatBody) -> Chat:
        """Raises `InvalidRequestError`."""
        choice = tool_choice(body)
        with_tools = choice.may_call
        if with_tools and self._tools is None:
            raise InvalidRequestError(
                "tools", "the model's chat template shows no known way to call them (--tool-call-parser)"
            )
        messages = plain_messages(body.messages)
        prompt = self._render(body, messages, with_tools)
        marks = None if self._reasoning is None else self._reasoning.marks
        if marks is None and body.thinking_token_budget is not None:
            reason = "the model's chat template shows no known way to think (--reasoning-parser)"
            raise InvalidRequestError("thinking_token_budget", reason)
        asked = requested_grammar(body, self._tokenizer.special_texts)
        if not with_tools and marks is None:
            return Chat(prompt, None, grammar=asked)
        continued = (messages[-1]["content"] or "") if body.continue_final_message else None
        is_open = marks is not None and marks.are_open(prompt, continued)
        parsing = Parsing(
            tools=self._tools if with_tools and asked is None else None,
            known=frozenset(tool.function.name for tool in body.tools or ()),
            one_call=not choice.several(body.parallel_tool_calls),
            is_harmony=any(each is not None and each.is_harmony for each in (self._tools, self._reasoning)),
            marks=marks,
            is_open=is_open,
            is_exact=asked is not None,
        )
        thinking = None
        if marks is not None and body.thinking_token_budget is not None:
            thinking = self._budget(body.thinking_token_budget, marks, is_open)
        return Chat(prompt, parsing, thinking, self._grammar(body, choice, parsing, asked))

    def _grammar(
        self, body: ChatBody, choice: ToolChoice, parsing: Parsing, asked: Grammar | None
    ) -> Grammar | None:
        """What is asked of the answer, or of its calls, behind its thinking."""
        offered = offers(body.tools or (), choice.name) if choice.may_call else []
        marks = HARMONY if parsing.is_harmony else parsing.marks
        spelling = Spelling(MARKERS, self._tokenizer.token_id)
        if not choice.must_call and not any(offer.strict for offer in offered):
            if asked is None or marks is None:
                return asked
            return asked._replace(text=after_thinking(asked.text, spelling, marks, parsing.is_open))
        if asked is not None:
            raise InvalidRequestError(
                asked.field, "not together with strict functions or a call that must be"
            )
        assert self._tools is not None
        text = tool_grammar(
            self._tools.form(self._template.source),
            offered,
            spelling,
            demanded=choice.must_call,
            several=not parsing.one_call,
            marks=marks,
            is_open=parsing.is_open,
        )
        return Grammar(text, "tools")

    def _budget(self, num_tokens: int, marks: Marks, is_open: bool) -> ThinkingBudget:
        end = self._tokenizer.encode(marks.end, add_special_tokens=False)
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return ThinkingBudget(num_tokens, marks, is_open, end, decode)

    def render(self, body: TokenizeBody) -> str:
        """The prompt alone."""
        return self._render(body, plain_messages(body.messages or ()), bool(body.tools))

    def _render(
        self, body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]], with_tools: bool
    ) -> str:
        continues = bool(body.continue_final_message)
        variables = decode_object(body.chat_template_kwargs, "chat_template_kwargs") or {}
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        tools = plain_tools(body.tools or ())
        if with_tools:
            variables["tools"] = tools
        return self._template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=variables,
        )
