"""Mistral's calls: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, later
`[TOOL_CALLS]name[ARGS]{...}`.
"""

from __future__ import annotations

from collections.abc import Collection

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import calls, named, word

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(answer: AnswerText, known: Collection[str]) -> Parse[None]:
    while marker := (yield from answer.until(OPEN)):
        answer.begin_part(marker)
        yield from answer.skip_space()
        name = yield from word(answer)
        if not name:
            yield from calls(answer)
            continue
        if (yield from answer.accept(CALL_ID)):
            yield from word(answer)
        yield from answer.accept(ARGS)
        yield from named(answer, name)
