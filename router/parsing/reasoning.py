"""Reasoning, between marks before the answer or in a channel of Harmony, and its token budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from protocol.outputs import TokenLogprobs, TokenOutput
from router.parsing.answer import AnswerText, Parse, tokens_in

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>", START)

_HEADS = (START, CHANNEL, MESSAGE, " to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.\-]+)")


class Marks(msgspec.Struct, frozen=True):
    """The marks around reasoning, each in several spellings. The prompt may end with the opening mark."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    end: str
    """Text that ends the thinking of a model that does not stop: a closing mark and the gap."""
    gap: str = ""
    """Text between the closing mark and an answer with a grammar."""
    lead: str = ""
    """Text after the gap, before an answer that is not a call."""
    frame: tuple[str, ...] = ()
    """Marks around the answer itself."""

    @property
    def markers(self) -> list[str]:
        """Marks that may be special tokens."""
        return tokens_in(self.open + self.close + self.frame)

    def parse(self, answer: AnswerText, is_open: bool, is_exact: bool) -> Parse[None]:
        """Parse the reasoning. With `is_exact` the content after the gap keeps its white space."""
        answer.frame = () if is_exact else self.frame
        answer.begin_part(may_be_text=True)
        yield from answer.skip_space()
        if not (yield from answer.accept(*self.open)) and not is_open:
            answer.give_up()
            return
        answer.commit()
        yield from answer.until(*self.close, write=answer.reasoning)
        if is_exact:
            yield from answer.accept(self.gap)
            answer.keep_space()

    def are_open_in(self, text: str, is_open: bool) -> bool:
        """Return whether an answer that begins with `text` is still thinking."""
        begins = is_open or text.lstrip().startswith(self.open)
        return begins and not any(mark in text for mark in self.close)

    def are_open(self, prompt: str, continued: str | None) -> bool:
        """Return whether the answer begins within the reasoning; a `continued` message may have begun it."""
        if continued is None:
            return prompt.rstrip().endswith(self.open)
        return max(map(continued.rfind, self.open)) > max(map(continued.rfind, self.close))


THINK = Marks(("<think>",), ("</think>",), "\n</think>\n\n", "\n\n")
GRANITE = Marks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    "\n\nHere is my response: ",
    " ",
)
_NEXT = f"{END}{START}assistant"
HARMONY = Marks(
    (f"{CHANNEL}analysis{MESSAGE}",),
    (_NEXT,),
    _NEXT,
    "",
    f"{CHANNEL}final{MESSAGE}",
)
"""Marks for code that must know when the thinking ends; Harmony's answers have their own parser."""
MISTRAL = Marks(("[THINK]",), ("[/THINK]",), "[/THINK]")
GEMMA4 = Marks(("<|channel>thought",), ("<channel|>",), "\n<channel|>")
HY3 = Marks(("<think:opensource>",), ("</think:opensource>",), "</think:opensource>")
HUNYUAN = msgspec.structs.replace(THINK, frame=("<answer>", "</answer>"))


def parse_harmony(answer: AnswerText, has_tools: bool, is_exact: bool) -> Parse[None]:
    """Parse an answer in Harmony. The prompt ends in the head of the first message, before its channel.

    With `is_exact` content keeps its white space.
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


_CERTAIN = TokenLogprobs(0.0, 1)


class ThinkingBudget(msgspec.Struct, frozen=True):
    """A budget of reasoning tokens. `end`: tokens that end the thinking; `is_open`: the prompt has begun it.

    If the first `num_tokens` tokens still think, the router appends `end` to the answer and places the
    request again with these tokens, as after the loss of a worker.
    """

    num_tokens: int
    marks: Marks
    is_open: bool
    end: list[int]
    decode: Callable[[list[int]], str]

    def exceeded(self, before: Sequence[int], output: TokenOutput, max_tokens: int) -> TokenOutput | None:
        """Return the output cut at the budget with `end` appended; None if the budget is not exceeded."""
        room = self.num_tokens - len(before)
        if not 0 <= room <= len(output.token_ids) or (room == len(output.token_ids) and output.finish_reason):
            return None
        kept = output.token_ids[:room]
        if not self.marks.are_open_in(self.decode([*before, *kept]), self.is_open):
            return None
        end = self.end[: max_tokens - self.num_tokens]
        logprobs = output.logprobs
        if logprobs is not None:
            logprobs = [*logprobs[:room], *[_CERTAIN] * len(end)]
        return msgspec.structs.replace(
            output,
            token_ids=[*kept, *end],
            logprobs=logprobs,
            finish_reason=None,
            stop_token_id=None,
            accepted_tokens=min(output.accepted_tokens, room),
        )
