"""The formats in which models write tool calls and reasoning, found by name or by the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from router.parsing import json_formats as marks
from router.parsing import reasoning, tagged
from router.parsing.answer import AnswerText, Parse, Part, tokens_in
from router.parsing.literals import GEMMA, PYTHON, Literals
from router.parsing.parameters import Parameters
from router.parsing.reasoning import Marks


class CallForm(msgspec.Struct, frozen=True):
    """The format in which calls are written. A block is `open`, calls with `separator` between them, and
    `close`. A call is `begin` with its name for `%s` and any number for `%d`, then its arguments, then `end`.
    Without a separator a block has one call, and blocks are joined by `between`.
    """

    trigger: str
    """Text that begins a block and occurs nowhere else; empty: a block is the whole answer."""
    open: str
    begin: str
    end: str
    close: str = ""
    separator: str | None = None
    between: str | None = None
    notation: Literals | None = None
    """Notation of the arguments; None: JSON."""
    elsewhere: str = ""
    """Regular expression for text that begins calls outside of blocks."""
    tags: tagged.Tags | None = None
    """Tags of the parameters; None: the arguments are JSON."""


def tagged_form(tags: tagged.Tags) -> CallForm:
    return CallForm(
        tags.open or tags.call,
        tags.line if tags.open else "",
        f"{tags.call if tags.open else ''}%s{tags.name_end}{tags.line}",
        tags.call_end + (tags.line if tags.close else ""),
        tags.close,
        separator="" if tags.has_several else None,
        between=None if tags.has_several else tags.line,
        elsewhere=re.escape(tags.call) if tags.open else "",
        tags=tags,
    )


_OBJECT = '{"name": "%s", "arguments": '
_PARAMETERS = '{"name": "%s", "parameters": '


def _block_form(
    calls: marks.Blocks, open: str, begin: str, end: str, *, close: str = "", **more: Any
) -> CallForm:
    """Return the form of blocks; the end mark of `calls` follows `close`."""
    return CallForm(calls.open[0], open, begin, end, close + calls.close, **more)


def _named_form(calls: marks.NamedCalls, begin: str, end: str, separator: str) -> CallForm:
    return CallForm(
        calls.open,
        "",
        f"{calls.call}{calls.lead}{begin}",
        f"{end}{calls.ends[-1]}",
        calls.close,
        separator=separator,
        elsewhere=re.escape(calls.call),
    )


HERMES = _block_form(marks.HERMES, "\n", _OBJECT, "}", close="\n", between="\n")
LLAMA3 = CallForm("", "", _PARAMETERS, "}", separator="; ", elsewhere=r"<\|python_tag\|>")
GRANITE = _block_form(
    marks.GRANITE, "[", _OBJECT, "}", close="]", separator=", ", elsewhere=marks.GRANITE.open[1]
)
HUNYUAN = _block_form(marks.HUNYUAN, "[", _OBJECT, "}", close="]", separator=", ")
INTERNLM = _block_form(marks.INTERNLM, "\n", _PARAMETERS, "}", between="")
PHI4 = _block_form(marks.PHI4, "", _OBJECT, "}", separator=", ")
XLAM = CallForm("", "[", _OBJECT, "}", "]", separator=", ", elsewhere=r"```(json)?\s*[\[{]")
PYTHONIC = CallForm(
    "", "[", "%s(", ")", "]", separator=", ", notation=PYTHON, elsewhere=r"<\|python_start\|>"
)
GEMMA4 = _block_form(marks.GEMMA4, "", "call:%s{", "}", between="", notation=GEMMA)
MISTRAL = CallForm(marks.MISTRAL.open, "[", _OBJECT, "}", "]", separator=", ")
MISTRAL_NAMED = CallForm(marks.MISTRAL.open, "", f"%s{marks.MISTRAL.begin}", "", between="")
DEEPSEEK_V3 = _named_form(marks.DEEPSEEK_V3, "%s\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = _named_form(marks.DEEPSEEK_V31, f"%s{marks.DEEPSEEK_V31.begin}", "", "")
KIMI_K2 = _named_form(marks.KIMI_K2, f"%s:%d{marks.KIMI_K2.begin}", "", "")
HARMONY = CallForm(
    reasoning.CHANNEL, "commentary to=functions.", f"%s {reasoning.CONSTRAIN}json{reasoning.MESSAGE}", ""
)
"""Harmony's form. It ends with the answer: the mark after a call is a token that ends it."""


class ToolFormat(msgspec.Struct, frozen=True):
    """A format of tool calls. Templates of its models contain one of `signs` and match `needs`."""

    signs: tuple[str, ...]
    parse: Callable[[AnswerText, Mapping[str, Parameters]], Parse[None]] | None
    """Parser of the answer; None: the whole answer is in Harmony."""
    markers: tuple[str, ...] = ()
    """Texts that the parser needs, even if they are special tokens."""
    forms: tuple[tuple[str, CallForm], ...] = ()
    """Signs and forms in which a grammar writes calls; the first whose sign is in the template applies."""
    short_ids: bool = False
    """Whether the template accepts only ids of nine letters and digits."""
    needs: str = ""

    @property
    def is_harmony(self) -> bool:
        return self.parse is None

    @property
    def has_types(self) -> bool:
        """Whether the parser reads arguments by their parameters' types."""
        return any(form.tags is not None for _, form in self.forms)

    def is_shown_by(self, template: str) -> bool:
        return _has(template, self.signs) and re.search(self.needs, template, re.DOTALL) is not None

    def form(self, template: str) -> CallForm:
        return next(form for sign, form in self.forms if sign in template)


class ReasoningFormat(msgspec.Struct, frozen=True):
    """A format of reasoning. Templates of its models contain one of `signs`."""

    signs: tuple[str, ...]
    marks: Marks

    @property
    def is_harmony(self) -> bool:
        return self.marks is reasoning.HARMONY


_HARMONY = (reasoning.START, reasoning.CHANNEL, reasoning.CONSTRAIN, reasoning.MESSAGE, *reasoning.ENDS)


def _format(
    calls: marks.Blocks | marks.NamedCalls | marks.Mistral,
    *signs: str,
    form: CallForm,
    other_forms: tuple[tuple[str, CallForm], ...] = (),
    short_ids: bool = False,
    needs: str = "",
) -> ToolFormat:
    markers = tuple(tokens_in(map(str, msgspec.structs.astuple(calls))))
    return ToolFormat(signs, calls.parse, markers, (*other_forms, ("", form)), short_ids, needs)


_JSON = r"\A(?!.*(?:<function=|<arg_key>|<parameter)).*"
"""Matches templates without the tags of other formats."""
_LINE = r"\s*(?:\\n|\n)"
"""Matches a line break in a template, or an escape for it in a string."""
_FUNCTION = "<tool_call>.*<function=.*"


def _tagged(tags: tagged.Tags, sign: str, needs: str = "") -> ToolFormat:
    return ToolFormat((sign,), tags.parse, tags.markers, (("", tagged_form(tags)),), needs=needs)


_QWEN3 = _tagged(tagged.QWEN3, "<parameter=", f"{_FUNCTION}<parameter=[^<>]*>{_LINE}")
_PYTHONIC = _format(marks.PYTHONIC, "[func_name1(", form=PYTHONIC)
TOOL_FORMATS = {
    "openai": ToolFormat((reasoning.CHANNEL,), None, _HARMONY, (("", HARMONY),)),
    "hy_v3": ToolFormat(
        ("<tool_sep",),
        tagged.parse_hy3,
        tuple(marker for tags in tagged.HY3 for marker in tags.markers),
        ((":opensource", tagged_form(tagged.HY3[1])), ("", tagged_form(tagged.HY3[0]))),
        needs="<arg_key",
    ),
    "kimi_k2": _format(marks.KIMI_K2, marks.KIMI_K2.open, "tool_declare", form=KIMI_K2),
    "deepseek_v3": _format(marks.DEEPSEEK_V3, "```json", form=DEEPSEEK_V3, needs=marks.DEEPSEEK_V3.open),
    "deepseek_v31": _format(marks.DEEPSEEK_V31, marks.DEEPSEEK_V31.open, form=DEEPSEEK_V31),
    "gemma4": _format(marks.GEMMA4, "<|tool_call>call:", form=GEMMA4),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _format(
        marks.MISTRAL,
        marks.MISTRAL.open,
        form=MISTRAL,
        other_forms=((marks.MISTRAL.begin, MISTRAL_NAMED),),
        short_ids=True,
    ),
    "granite": _format(marks.GRANITE, marks.GRANITE.open[0], form=GRANITE),
    "hunyuan_a13b": _format(marks.HUNYUAN, "<tool_calls>[", form=HUNYUAN),
    "internlm": _format(marks.INTERNLM, marks.INTERNLM.open[0], form=INTERNLM),
    "phi4_mini_json": _format(marks.PHI4, marks.PHI4.open[0], form=PHI4),
    "xlam": _format(marks.XLAM, '[{"name": "tool_call_name", "arguments":', form=XLAM),
    "hermes": _format(marks.HERMES, marks.HERMES.open[0], form=HERMES, needs=_JSON + r'"name\\?"\s*:'),
    "llama3_json": _format(
        marks.LLAMA3,
        marks.LLAMA3.open[0],
        '{"name": function name, "parameters":',
        form=LLAMA3,
        needs=_JSON,
    ),
    "qwen3_coder": _QWEN3,
    "qwen3_xml": _QWEN3,
    "step3p5": _QWEN3,
    "mimo": _tagged(tagged.MIMO, "<parameter=", rf"{_FUNCTION}<parameter=[^<>]*>[^<>\\\n]+</parameter>"),
    "glm45": _tagged(tagged.GLM45, "<arg_key>", f"</arg_key>{_LINE}\\s*<arg_value>"),
    "glm47": _tagged(tagged.GLM47, "</arg_key><arg_value>"),
    "minimax_m2": _tagged(tagged.MINIMAX, tagged.MINIMAX.open, tagged.MINIMAX.call),
    "deepseek_v32": _tagged(tagged.DEEPSEEK32, tagged.DSML, "function_calls>"),
    "deepseek_v4": _tagged(tagged.DEEPSEEK4, tagged.DSML, r"\A(?!.*function_calls>).*tool_calls>"),
}
REASONING_FORMATS = {
    "openai_gptoss": ReasoningFormat((reasoning.CHANNEL,), reasoning.HARMONY),
    "gemma4": ReasoningFormat(reasoning.GEMMA4.close, reasoning.GEMMA4),
    "hunyuan_a13b": ReasoningFormat(("<tool_calls>[",), reasoning.HUNYUAN),
    "hy_v3": ReasoningFormat((":opensource",), reasoning.HY3),
    "granite": ReasoningFormat(reasoning.GRANITE.open, reasoning.GRANITE),
    "mistral": ReasoningFormat(reasoning.MISTRAL.open, reasoning.MISTRAL),
    "deepseek_r1": ReasoningFormat(reasoning.THINK.close, reasoning.THINK),
    "qwen3": ReasoningFormat(reasoning.THINK.close, reasoning.THINK),
}
MARKERS = frozenset(
    [
        *(marker for each in TOOL_FORMATS.values() for marker in each.markers),
        *(mark for each in REASONING_FORMATS.values() for mark in each.marks.markers),
    ]
)
"""Texts that grammars must spell as one token if the tokenizer has a token for them."""


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format with this name; `auto`: the format of the chat template."""
    if name != "auto":
        return TOOL_FORMATS.get(name)
    return next((each for each in TOOL_FORMATS.values() if each.is_shown_by(template)), None)


def name_of(tools: ToolFormat) -> str:
    return next(name for name, each in TOOL_FORMATS.items() if each is tools)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((each for each in REASONING_FORMATS.values() if _has(template, each.signs)), None)


def _has(template: str, signs: tuple[str, ...]) -> bool:
    return any(sign in template for sign in signs)


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that an answer may have. `tools`: the format of calls; None: no function was offered."""

    tools: str | None = None
    known: dict[str, Parameters] = {}
    """Parameter types of the offered functions by name; empty types if the format needs none."""
    one_call: bool = False
    """Whether only the first call is kept."""
    must_call: bool = False
    """Whether a grammar makes the answer call a function."""
    is_harmony: bool = False
    marks: Marks | None = None
    """Marks around the reasoning."""
    is_open: bool = False
    """Whether the prompt ends within the reasoning."""
    is_exact: bool = False
    """Whether the content matches a grammar and keeps all its white space."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that parsers must see, even if they are special tokens."""
        markers = {*(TOOL_FORMATS[self.tools].markers if self.tools is not None else ())}
        if self.is_harmony:
            markers.update(_HARMONY)
        if self.marks is not None:
            markers.update(self.marks.markers)
        return frozenset(markers)

    def parse(self, answer: AnswerText) -> Parse[None]:
        if self.is_harmony:
            yield from reasoning.parse_harmony(answer, self.tools is not None, self.is_exact)
            return
        if self.marks is not None:
            yield from self.marks.parse(answer, self.is_open, self.is_exact)
        if self.tools is not None and (parse := TOOL_FORMATS[self.tools].parse) is not None:
            yield from parse(answer, self.known)
        yield from answer.until()


class AnswerParser:
    """The parser of one choice's answer."""

    def __init__(self, parsing: Parsing) -> None:
        self._answer = AnswerText(must_call=parsing.must_call)
        self._steps = parsing.parse(self._answer)
        next(self._steps, None)

    def push(self, text: str) -> list[Part]:
        """Return the parts that the new text completes."""
        if text:
            self._answer.push(text)
            next(self._steps, None)
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the last parts. `is_cut`: a limit or a stop string ended the answer."""
        self._answer.is_over, self._answer.is_cut = True, is_cut
        next(self._steps, None)
        self._answer.finish()
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._answer.parts = self._answer.parts, []
        return parts
