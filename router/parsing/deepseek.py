"""DeepSeek's calls between marks. V3 and R1 write the arguments in a Markdown block, V3.1 without one."""

from __future__ import annotations

from collections.abc import Collection

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import named, word

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def parse(answer: AnswerText, known: Collection[str]) -> Parse[None]:
    while marker := (yield from answer.until(OPEN)):
        answer.begin_part(marker)
        while (yield from _call(answer)):
            yield from answer.skip_space()
        answer.give_up()
        yield from answer.accept(CLOSE)


def _call(answer: AnswerText) -> Parse[bool]:
    yield from answer.skip_space()
    if not (marker := (yield from answer.accept(CALL))):
        return False
    answer.begin_part(marker)
    name = yield from word(answer)
    yield from answer.accept(SEPARATOR)
    if name == "function":
        name = yield from word(answer)
        yield from answer.skip_space()
        yield from answer.accept("```json")
    if not (yield from named(answer, name)):
        return False
    yield from answer.skip_space()
    yield from answer.accept("```")
    yield from answer.skip_space()
    yield from answer.accept(CALL_END)
    return True
