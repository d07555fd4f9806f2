"""Harmony, gpt-oss' format: messages with a channel each for reasoning, content and calls."""

from __future__ import annotations

import re

from router.parsing.answer import AnswerText, Parse

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START)

_HEADS = (START, CHANNEL, MESSAGE, " to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.\-]+)")


def parse(answer: AnswerText, has_tools: bool, is_exact: bool) -> Parse[None]:
    """Parse an answer. The prompt ends within the first message's head, before its channel.

    If the answer `is_exact`, content keeps its white space.
    """
    may_be_text = True
    while (yield from answer.peek()):
        head = [(yield from answer.accept(*_HEADS))]
        answer.begin_part(head[0], may_be_text=may_be_text and head[0] not in (START, CHANNEL))
        may_be_text = False
        if head == [""]:
            answer.give_up()
        elif head != [MESSAGE] and not (yield from answer.until(MESSAGE, write=head.append)):
            return
        yield from _body(answer, "".join(head), has_tools, is_exact)


def _body(answer: AnswerText, head: str, has_tools: bool, is_exact: bool) -> Parse[None]:
    channel, function = _CHANNEL.search(head), _FUNCTION.search(head)
    write = answer.content
    if function is not None and has_tools:
        answer.call(function[1])
        write = answer.arguments
    elif head:
        answer.commit()
        if channel is not None and channel[1] == "analysis":
            write = answer.reasoning
        if is_exact:
            answer.keep_space()
    yield from answer.until(*ENDS, write=write)
