"""A budget for reasoning: where an answer still thinks after so many tokens, its thinking is ended for it.

That is decided by the answer's first tokens alone. The request goes on behind the end that was written into
it as one does whose worker was lost, so nobody else has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from protocol.outputs import TokenLogprobs, TokenOutput
from router.parsing.reasoning import Marks

_CERTAIN = TokenLogprobs(0.0, 1)


class ThinkingBudget(msgspec.Struct, frozen=True):
    """`end` are the tokens that end the thinking; `is_open` tells that the prompt began it."""

    num_tokens: int
    marks: Marks
    is_open: bool
    end: list[int]
    decode: Callable[[list[int]], str]

    def exceeded(self, before: Sequence[int], output: TokenOutput, max_tokens: int) -> TokenOutput | None:
        """The output with the thinking's end in place of what came after the budget; None where it holds."""
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
