"""Parses reasoning between marks, before the answer. The prompt may end with the first mark."""

from __future__ import annotations

import msgspec

from router.parsing import harmony
from router.parsing.answer import AnswerText, Parse, tokens_in


class Marks(msgspec.Struct, frozen=True):
    """The marks around reasoning, each in several spellings."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    end: str
    """The text that ends the thinking of a model that does not stop: a closing mark and the gap."""
    gap: str = ""
    """The text between the closing mark and an answer that has a grammar."""
    lead: str = ""
    """The text after the gap, before an answer that is not a call."""
    frame: tuple[str, ...] = ()
    """Marks around the answer itself."""

    @property
    def markers(self) -> list[str]:
        """The texts that may be special tokens."""
        return tokens_in(self.open + self.close + self.frame)

    def parse(self, answer: AnswerText, is_open: bool, is_exact: bool) -> Parse[None]:
        """Parse the reasoning. If the answer `is_exact`, the content after the gap keeps its white space."""
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
        """Whether an answer that begins with `text` is still thinking."""
        begins = is_open or text.lstrip().startswith(self.open)
        return begins and not any(mark in text for mark in self.close)

    def are_open(self, prompt: str, continued: str | None) -> bool:
        """Whether the answer begins within the reasoning; it may continue a message."""
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
_NEXT = f"{harmony.END}{harmony.START}assistant"
HARMONY = Marks(
    (f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",),
    (_NEXT,),
    _NEXT,
    "",
    f"{harmony.CHANNEL}final{harmony.MESSAGE}",
)
"""Harmony has its own parser; these marks are for code that must know when the thinking ends."""
MISTRAL = Marks(("[THINK]",), ("[/THINK]",), "[/THINK]")
GEMMA4 = Marks(("<|channel>thought",), ("<channel|>",), "\n<channel|>")
HY3 = Marks(("<think:opensource>",), ("</think:opensource>",), "</think:opensource>")
HUNYUAN = msgspec.structs.replace(THINK, frame=("<answer>", "</answer>"))
