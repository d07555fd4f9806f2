"""Reasoning between marks, before the answer. The prompt may end with the first mark."""

from __future__ import annotations

import msgspec

from router.parsing import harmony
from router.parsing.answer import AnswerText, Parse


class Marks(msgspec.Struct, frozen=True):
    """Each pair's parts in several spellings."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    end: str
    """Text that ends the thinking for a model that does not: a closing mark and the gap."""
    gap: str = ""
    """Text between the closing mark and an answer that has a grammar."""
    lead: str = ""
    """What then comes before an answer that is no call."""

    def parse(self, answer: AnswerText, is_open: bool, is_exact: bool) -> Parse[None]:
        """The content after it keeps its white space where it `is_exact`: then the gap alone is left out."""
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
        """Whether an answer that begins so still thinks."""
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
"""Its answers have a parser of their own; these are for those who must know when it has thought."""
MISTRAL = Marks(("[THINK]",), ("[/THINK]",), "[/THINK]")
