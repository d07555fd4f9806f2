"""Reasoning between marks, before the answer. The prompt may end with the first mark."""

from __future__ import annotations

import msgspec

from router.parsing.answer import Answer, Parse


class Marks(msgspec.Struct, frozen=True):
    """Each pair's parts in several spellings."""

    open: tuple[str, ...]
    close: tuple[str, ...]

    def parse(self, answer: Answer, is_open: bool) -> Parse[None]:
        answer.begin()
        yield from answer.skip_space()
        if not (yield from answer.accept(*self.open)) and not is_open:
            answer.give_up()
            return
        answer.commit()
        yield from answer.until(*self.close, write=answer.reasoning)

    def are_open(self, prompt: str, continued: str | None) -> bool:
        """Whether the answer begins within the reasoning; it may continue a message."""
        if continued is None:
            return prompt.rstrip().endswith(self.open)
        return max(map(continued.rfind, self.open)) > max(map(continued.rfind, self.close))


THINK = Marks(("<think>",), ("</think>",))
GRANITE = Marks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
MISTRAL = Marks(("[THINK]",), ("[/THINK]",))
