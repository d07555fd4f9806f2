"""A token budget for reasoning: if the answer still thinks after that many tokens, the router ends its
thinking.

The answer's first tokens alone decide that. The router appends the end of thinking to the output and resumes
the request after it, in the same way as after the loss of a worker, so no other part has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from protocol.outputs import TokenLogprobs, TokenOutput
from router.parsing.reasoning import Marks

_CERTAIN = TokenLogprobs(0.0, 1)


class ThinkingBudget(msgspec.Struct, frozen=True):
    """`end` has the tokens that end the thinking; `is_open` says that the prompt began it."""

    num_tokens: int
    marks: Marks
    is_open: bool
    end: list[int]
    decode: Callable[[list[int]], str]

    def exceeded(self, before: Sequence[int], output: TokenOutput, max_tokens: int) -> TokenOutput | None:
        """Return the output with the end of thinking after the budget, or None if the budget is kept."""
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
