"""Calls with tagged parameters; the text of each is a string as it is, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import msgspec

from router.parsing.answer import AnswerText, Parse
from router.parsing.parameters import STRING, Parameters, as_json

DSML = "｜DSML｜"
"""A token in each of DeepSeek's tags."""


class Tags(msgspec.Struct, frozen=True):
    """The tags of calls: `open`, then calls of `call`, the name, `name_end`, parameters and `call_end`, then
    `close`. A parameter is `key`, its name, `key_end`, its value and `value_end`.
    """

    call: str
    call_end: str
    key: str
    key_end: str
    value_end: str
    name_end: str = ""
    open: str = ""
    """Tag before a block; empty: each call is a block."""
    close: str = ""
    pad: str = ""
    """Line break on both sides of a value."""
    line: str = "\n"
    """Line break between tags."""
    has_several: bool = False
    """Whether a block may have several calls."""
    value: str = ""
    """Tag before the value, after `key_end`."""
    kinds: tuple[str, str] | None = None
    """Other spellings of `key_end`, for values that are strings, and for JSON."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that may be special tokens, or added tokens."""
        tags = (self.open, self.close, self.call, self.key, self.key_end, self.value, self.value_end)
        whole = [tag for tag in tags if tag[:1] == "<" and tag[-1:] == ">"]
        return (*whole, self.call_end, *([DSML] if DSML in self.call else ()))

    def parse(self, answer: AnswerText, known: Mapping[str, Parameters]) -> Parse[None]:
        while marker := (yield from answer.until(*filter(None, (self.open, self.call)))):
            yield from self.block(answer, known, marker)

    def block(self, answer: AnswerText, known: Mapping[str, Parameters], marker: str) -> Parse[None]:
        """Parse the calls after a mark."""
        answer.begin_part(marker)
        is_sure = marker == self.open
        while (yield from self._begins(answer, marker)):
            marker = ""
            if not (yield from self._call(answer, known, is_sure)):
                break
        answer.give_up()
        if self.close:
            yield from answer.accept(self.close)

    def _begins(self, answer: AnswerText, marker: str) -> Parse[bool]:
        """Read the mark of a call, unless `marker` was that already: models may leave `open` out."""
        if marker == self.call:
            return True
        yield from answer.skip_space()
        if not (marker := (yield from answer.accept(self.call))):
            return False
        answer.begin_part(marker)
        return True

    def _call(self, answer: AnswerText, known: Mapping[str, Parameters], is_sure: bool) -> Parse[bool]:
        """Read a call. Its arguments stay open if it is cut off or has other text between its tags.

        Unless it `is_sure` to be a call, it must have a parameter or name an offered function.
        """
        yield from answer.skip_space()
        name = yield from answer.word()
        yield from answer.skip_space()
        if not name or (self.name_end and not (yield from answer.accept(self.name_end))):
            return False
        mark = yield from self._mark(answer)
        if not (is_sure or mark == self.key or (mark and name in known)):
            return False
        answer.call(name)
        answer.arguments("{")
        separator = ""
        while mark == self.key:
            if not (yield from self._parameter(answer, known.get(name, Parameters()), separator)):
                return False
            separator, mark = ", ", (yield from self._mark(answer))
        if not mark and ((yield from answer.peek()) or answer.is_cut):
            return False
        answer.arguments("}")
        return True

    def _mark(self, answer: AnswerText) -> Parse[str]:
        """Read the mark before a parameter or after the call."""
        yield from answer.skip_space()
        return (yield from answer.accept(*filter(None, (self.key, self.call_end, self.close))))

    def _parameter(self, answer: AnswerText, known: Parameters, separator: str) -> Parse[bool]:
        key: list[str] = []
        end = yield from answer.until(self.key_end, *self.kinds or (), write=key.append)
        if not end:
            if not answer.is_cut:
                answer.content(self.key + "".join(key))
            return False
        if self.value:
            yield from answer.skip_space()
            yield from answer.accept(self.value)
        if self.pad:
            yield from answer.accept(self.pad)
        name = "".join(key).strip()
        answer.arguments(f"{separator}{_quoted(name)}: ")
        types = known.of(name)
        is_string, is_json = (end == kind for kind in self.kinds or ("", ""))
        if is_json and name not in known.types:
            types = ()
        if tuple(types) == STRING or (is_string and "string" in types):
            return (yield from self._string(answer))
        texts: list[str] = []
        if (yield from self._value(answer, texts.append)):
            answer.arguments(as_json("".join(texts), types))
            return True
        if (begun := "".join(texts).strip())[:1] in _JSON_BEGINS:
            answer.arguments(begun)
        return False

    def _string(self, answer: AnswerText) -> Parse[bool]:
        """Write a string's text as it comes."""
        answer.arguments('"')
        if not (yield from self._value(answer, lambda text: answer.arguments(_quoted(text)[1:-1]))):
            return False
        answer.arguments('"')
        return True

    def _value(self, answer: AnswerText, write: Callable[[str], object]) -> Parse[str]:
        return (yield from answer.until(self.pad + self.value_end, self.value_end, write=write))


_JSON_BEGINS = tuple("{[-0123456789")
"""Beginnings of values to pass on even if cut off: unlike a word, such text can only be JSON."""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_FUNCTION = Tags(
    open="<tool_call>",
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    close="</tool_call>",
)
QWEN3 = msgspec.structs.replace(_FUNCTION, pad="\n")
MIMO = _FUNCTION
GLM45 = Tags(
    call="<tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
GLM47 = msgspec.structs.replace(GLM45, line="")
MINIMAX = Tags(
    open="<minimax:tool_call>",
    call='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    call_end="</invoke>",
    close="</minimax:tool_call>",
    has_several=True,
)
DEEPSEEK32 = Tags(
    open=f"<{DSML}function_calls>",
    call=f'<{DSML}invoke name="',
    name_end='">',
    key=f'<{DSML}parameter name="',
    key_end='">',
    value_end=f"</{DSML}parameter>",
    call_end=f"</{DSML}invoke>",
    close=f"</{DSML}function_calls>",
    has_several=True,
    kinds=('" string="true">', '" string="false">'),
)
DEEPSEEK4 = msgspec.structs.replace(DEEPSEEK32, open=f"<{DSML}tool_calls>", close=f"</{DSML}tool_calls>")


def _hy3(suffix: str) -> Tags:
    return Tags(
        open=f"<tool_calls{suffix}>",
        call=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>",
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        call_end=f"</tool_call{suffix}>",
        close=f"</tool_calls{suffix}>",
        has_several=True,
    )


HY3 = (_hy3(""), _hy3(":opensource"))
"""Hy 3's tags before and since its publication."""


def parse_hy3(answer: AnswerText, known: Mapping[str, Parameters]) -> Parse[None]:
    while marker := (yield from answer.until(*(tags.open for tags in HY3))):
        for tags in HY3:
            if tags.open == marker:
                yield from tags.block(answer, known, marker)
