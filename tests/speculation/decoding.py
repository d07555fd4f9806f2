"""Makes decoding sequences without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams


def decoding(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    request_id: str = "a",
    salt: str = "",
    prediction: Sequence[int] = (),
) -> SequenceState:
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        sampling=SamplingParams(max_tokens=10_000),
        cache_salt=salt,
        prediction=list(prediction),
    )
    return SequenceState(request, order=0)


def chains(drafts: list[Draft | None]) -> list[list[int]]:
    """Return the tokens of drafts that are chains, and none where there is no draft."""
    assert all(draft is None or draft.masks() is None for draft in drafts)
    return [[] if draft is None else draft.token_ids for draft in drafts]
