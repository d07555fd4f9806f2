"""Sequences that decode, without an engine."""

from __future__ import annotations

from collections.abc import Sequence as Many

from engine.sequence import Sequence
from engine.speculator import Draft
from protocol.messages import EngineRequest
from protocol.sampling import SamplingParams


def decoding(prompt: Many[int], output: Many[int] = (), *, request_id: str = "a", salt: str = "") -> Sequence:
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        sampling=SamplingParams(max_tokens=10_000),
        cache_salt=salt,
    )
    return Sequence(request, order=0)


def chains(drafts: list[Draft | None]) -> list[list[int]]:
    """The tokens of drafts that are chains; none where there is no draft."""
    assert all(draft is None or draft.masks() is None for draft in drafts)
    return [[] if draft is None else draft.token_ids for draft in drafts]
