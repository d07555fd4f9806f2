"""What the sampler is told about each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One token to choose: `position` is its absolute position in prompt + output.

    Several rows may belong to one request, each with the output that would precede its token.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    position: int
    request_id: str
