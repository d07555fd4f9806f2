"""Llama 3's calls: `{"name": ..., "parameters": {...}}` instead of an answer, or after `<|python_tag|>`.

Such an object may as well be the answer itself, so it is a call only if it names an offered function.
"""

from __future__ import annotations

from collections.abc import Collection

from router.parsing.answer import AnswerText, Parse
from router.parsing.json_calls import calls

TAG = "<|python_tag|>"


def parse(answer: AnswerText, known: Collection[str]) -> Parse[None]:
    answer.begin_part(may_be_text=True)
    yield from answer.skip_space()
    answer.begin_part((yield from answer.accept(TAG)))
    yield from calls(answer, known, separator=";")
    while marker := (yield from answer.until(TAG)):
        answer.begin_part(marker)
        yield from calls(answer, known, separator=";")
