"""The formats in which models write tool calls and reasoning, found by name or by the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from router.parsing import forms, harmony, json_formats
from router.parsing.answer import AnswerText, Parse, Part
from router.parsing.forms import CallForm
from router.parsing.reasoning import GRANITE, HARMONY, MISTRAL, THINK, Marks


class ToolFormat(msgspec.Struct, frozen=True):
    """A format of tool calls. The templates of models that use it contain one of `signs`."""

    signs: tuple[str, ...]
    parse: Callable[[AnswerText, Collection[str]], Parse[None]] | None
    """None: the whole answer is in Harmony."""
    markers: tuple[str, ...] = ()
    """Texts that the parser needs, even if they are special tokens."""
    forms: tuple[tuple[str, CallForm], ...] = ()
    """The forms in which a grammar has calls written. The first one whose sign is in the template applies.
    """
    short_ids: bool = False
    """The template accepts only ids of nine letters and digits."""

    @property
    def is_harmony(self) -> bool:
        return self.parse is None

    def form(self, template: str) -> CallForm:
        return next(form for sign, form in self.forms if sign in template)


class ReasoningFormat(msgspec.Struct, frozen=True):
    """A format of reasoning. The templates of models that use it contain one of `signs`."""

    signs: tuple[str, ...]
    marks: Marks

    @property
    def is_harmony(self) -> bool:
        return self.marks is HARMONY


_HARMONY = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS)


def _json(
    calls: json_formats.Objects | json_formats.Named | json_formats.Mistral,
    *signs: str,
    form: CallForm,
    other_forms: tuple[tuple[str, CallForm], ...] = (),
    short_ids: bool = False,
) -> ToolFormat:
    markers = tuple(dict.fromkeys(_TOKEN.findall(" ".join(map(str, msgspec.structs.astuple(calls))))))
    return ToolFormat(signs, calls.parse, markers, (*other_forms, ("", form)), short_ids)


_TOKEN = re.compile(r"<[^<>]*>|\[[A-Z_]+\]")
"""A mark that may be a special token."""
TOOL_FORMATS = {
    "openai": ToolFormat((harmony.CHANNEL,), None, _HARMONY, (("", forms.HARMONY),)),
    "kimi_k2": _json(json_formats.KIMI_K2, json_formats.KIMI_K2.open, "tool_declare", form=forms.KIMI_K2),
    "deepseek_v3": _json(json_formats.DEEPSEEK_V3, "'```json'", "\\n```json\\n", form=forms.DEEPSEEK_V3),
    "deepseek_v31": _json(json_formats.DEEPSEEK_V31, json_formats.DEEPSEEK_V31.open, form=forms.DEEPSEEK_V31),
    "mistral": _json(
        json_formats.MISTRAL,
        json_formats.MISTRAL.open,
        form=forms.MISTRAL,
        other_forms=((json_formats.MISTRAL.begin, forms.MISTRAL_NAMED),),
        short_ids=True,
    ),
    "granite": _json(json_formats.GRANITE, json_formats.GRANITE.open[0], form=forms.GRANITE),
    "hunyuan_a13b": _json(json_formats.HUNYUAN, "<tool_calls>[", form=forms.HUNYUAN),
    "internlm": _json(json_formats.INTERNLM, json_formats.INTERNLM.open[0], form=forms.INTERNLM),
    "phi4_mini_json": _json(json_formats.PHI4, json_formats.PHI4.open[0], form=forms.PHI4),
    "xlam": _json(json_formats.XLAM, "single JSON array", form=forms.XLAM),
    "hermes": _json(json_formats.HERMES, json_formats.HERMES.open[0], form=forms.HERMES),
    "llama3_json": _json(
        json_formats.LLAMA3,
        json_formats.LLAMA3.open[0],
        '{"name": function name, "parameters":',
        form=forms.LLAMA3,
    ),
}
REASONING_FORMATS = {
    "openai_gptoss": ReasoningFormat((harmony.CHANNEL,), HARMONY),
    "granite": ReasoningFormat(GRANITE.open, GRANITE),
    "mistral": ReasoningFormat(MISTRAL.open, MISTRAL),
    "deepseek_r1": ReasoningFormat(THINK.close, THINK),
    "qwen3": ReasoningFormat(THINK.close, THINK),
}
MARKERS = frozenset(
    [
        *(marker for each in TOOL_FORMATS.values() for marker in each.markers),
        *(mark for each in REASONING_FORMATS.values() for mark in each.marks.open + each.marks.close),
    ]
)
"""Texts that grammars must spell as one token if the tokenizer has one for them."""
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Signs of formats that look like one of these but differ."""


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format with this name; `auto`: the format that the chat template shows."""
    if name != "auto":
        return TOOL_FORMATS.get(name)
    if any(sign in template for sign in _OTHER_CALLS):
        return None
    return next((each for each in TOOL_FORMATS.values() if _has(template, each.signs)), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((each for each in REASONING_FORMATS.values() if _has(template, each.signs)), None)


def _has(template: str, signs: tuple[str, ...]) -> bool:
    return any(sign in template for sign in signs)


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that an answer may have. `tools` is the format of calls, if any function was offered."""

    tools: ToolFormat | None = None
    known: frozenset[str] = frozenset()
    """The offered functions."""
    one_call: bool = False
    """Only the first call is kept."""
    is_harmony: bool = False
    marks: Marks | None = None
    """The marks around the reasoning."""
    is_open: bool = False
    """The prompt ends within the reasoning."""
    is_exact: bool = False
    """The content matches a grammar and keeps all its white space."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts that parsers must see, even if they are special tokens."""
        markers = {*(self.tools.markers if self.tools is not None else ())}
        if self.is_harmony:
            markers.update(_HARMONY)
        if self.marks is not None:
            markers.update(self.marks.open, self.marks.close)
        return frozenset(markers)

    def parse(self, answer: AnswerText) -> Parse[None]:
        if self.is_harmony:
            yield from harmony.parse(answer, self.tools is not None, self.is_exact)
            return
        if self.marks is not None:
            yield from self.marks.parse(answer, self.is_open, self.is_exact)
        if self.tools is not None and self.tools.parse is not None:
            yield from self.tools.parse(answer, self.known)
        yield from answer.until()


class AnswerParser:
    """Finds the parts of one choice's answer."""

    def __init__(self, parsing: Parsing) -> None:
        self._answer = AnswerText()
        self._steps = parsing.parse(self._answer)
        next(self._steps, None)

    def push(self, text: str) -> list[Part]:
        """Return the parts that the text completes."""
        if text:
            self._answer.push(text)
            next(self._steps, None)
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the parts that the text's end completes. `is_cut`: the model had not ended."""
        self._answer.is_over, self._answer.is_cut = True, is_cut
        next(self._steps, None)
        self._answer.finish()
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._answer.parts = self._answer.parts, []
        return parts
