"""The formats of calls as data: the marks around them, the place of their names, the arguments' notation."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import calls, json_call, named, word
from router.parsing.literals import GEMMA, PYTHON, Literals


class Blocks(msgspec.Struct, frozen=True):
    """Blocks of calls: one, several with `separator`, or a list; in JSON, or in a `notation`."""

    open: tuple[str, ...]
    close: str = ""
    separator: str = ","
    language: str = ""
    """A word that may follow the opening mark."""
    is_answer: bool = False
    """The answer may be a block without marks, or JSON that was asked for: only offered functions count."""
    is_list: bool = False
    """Only a list is a block."""
    notation: Literals | None = None

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        if self.is_answer:
            answer.begin_part(may_be_text=True)
            yield from answer.skip_space()
            yield from self._block(answer, known, (yield from answer.accept(*self.open)))
        while marker := (yield from answer.until(*self.open)):
            yield from self._block(answer, known, marker)

    def _block(self, answer: AnswerText, known: Collection[str], marker: str) -> Parse[None]:
        answer.begin_part(marker)
        if marker:
            yield from answer.accept(self.language)
        parse = json_call if self.notation is None else self.notation.parse
        offered = known if self.is_answer else None
        if (yield from calls(answer, parse, offered, self.separator, self.is_list)) and marker:
            yield from answer.skip_space()
            yield from answer.accept(self.close)


class Named(msgspec.Struct, frozen=True):
    """Blocks of calls whose names come before their arguments. Models leave out any mark but `call`."""

    open: str
    close: str
    call: str
    """The mark before a call."""
    lead: str
    """A mark before the name."""
    begin: str
    """The mark before the arguments."""
    ends: tuple[str, ...]
    """The marks behind the arguments."""
    numbers: bool = False
    """The name has a number behind it. Both with the lead are the call's id."""

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        while marker := (yield from answer.until(self.open, self.call)):
            answer.begin_part(marker)
            begins = marker == self.call or (yield from self._begins(answer))
            while begins and (yield from self._call(answer)):
                begins = yield from self._begins(answer)
            answer.give_up()
            yield from answer.accept(self.close)

    def _begins(self, answer: AnswerText) -> Parse[bool]:
        yield from answer.skip_space()
        if marker := (yield from answer.accept(self.call)):
            answer.begin_part(marker)
        return bool(marker)

    def _call(self, answer: AnswerText) -> Parse[bool]:
        """Parse a call behind its mark."""
        yield from answer.skip_space()
        lead = yield from answer.accept(self.lead)
        name = yield from word(answer)
        call_id = ""
        if self.numbers and (yield from answer.accept(":")):
            call_id = f"{lead}{name}:{(yield from word(answer))}"
        yield from answer.skip_space()
        yield from answer.accept(self.begin)
        if not (yield from named(answer, name, call_id)):
            return False
        for mark in self.ends:
            yield from answer.skip_space()
            yield from answer.accept(mark)
        return True


class Mistral(msgspec.Struct, frozen=True):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, later `[TOOL_CALLS]name[ARGS]{...}`."""

    open: str = "[TOOL_CALLS]"
    call_id: str = "[CALL_ID]"
    begin: str = "[ARGS]"

    def parse(self, answer: AnswerText, known: Collection[str]) -> Parse[None]:
        while marker := (yield from answer.until(self.open)):
            answer.begin_part(marker)
            yield from answer.skip_space()
            name = yield from word(answer)
            if not name:
                yield from calls(answer, json_call)
                continue
            if (yield from answer.accept(self.call_id)):
                yield from word(answer)
            yield from answer.accept(self.begin)
            yield from named(answer, name)


HERMES = Blocks(("<tool_call>",), "</tool_call>")
GRANITE = Blocks(("<|tool_call|>", "<tool_call>"))
LLAMA3 = Blocks(("<|python_tag|>",), separator=";", is_answer=True)
HUNYUAN = Blocks(("<tool_calls>",), "</tool_calls>")
INTERNLM = Blocks(("<|action_start|><|plugin|>",), "<|action_end|>")
PHI4 = Blocks(("functools[",), "]")
XLAM = Blocks(("```",), "```", language="json", is_answer=True)
PYTHONIC = Blocks(("<|python_start|>",), "<|python_end|>", is_answer=True, is_list=True, notation=PYTHON)
GEMMA4 = Blocks(("<|tool_call>",), "<tool_call|>", notation=GEMMA)
MISTRAL = Mistral()
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_SEPARATOR, _CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_V3 = Named(*_DEEPSEEK, f"function{_SEPARATOR}", "```json", ("```", _CALL_END))
DEEPSEEK_V31 = Named(*_DEEPSEEK, "", _SEPARATOR, (_CALL_END,))
KIMI_K2 = Named(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "functions.",
    "<|tool_call_argument_begin|>",
    ("<|tool_call_end|>",),
    numbers=True,
)
