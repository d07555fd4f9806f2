"""The calls of Hermes, Qwen and Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Collection

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(answer: AnswerText, known: Collection[str]) -> Parse[None]:
    while marker := (yield from answer.until(OPEN)):
        answer.begin_part(marker)
        if (yield from calls(answer)):
            yield from answer.skip_space()
            yield from answer.accept(CLOSE)
