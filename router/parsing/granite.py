"""Granite 3's calls: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from collections.abc import Collection

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import calls

OPEN = ("<|tool_call|>", "<tool_call>")


def parse(answer: AnswerText, known: Collection[str]) -> Parse[None]:
    while marker := (yield from answer.until(*OPEN)):
        answer.begin_part(marker)
        yield from calls(answer)
