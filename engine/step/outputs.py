"""Makes a step's tokens a sequence's output: keeps them up to its end, and tells them to the router."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.step.draft import Outcome
from engine.step.sequence import SequenceState
from protocol.outputs import ErrorKind, FinishReason, RequestTiming, TokenOutput, logprobs_pages


@dataclass(slots=True)
class Kept:
    """Tokens that became output, and why there will be no more."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def keep_tokens(sequence: SequenceState, token_ids: Sequence[int], eos: Collection[int]) -> Kept:
    """Append them to the sequence, none after the one that ends it."""
    kept = Kept()
    for token_id in token_ids:
        sequence.append(token_id)
        kept.token_ids.append(token_id)
        if sequence.hold_at is None:
            num_tokens = len(sequence.output_token_ids)
            kept.finish_reason, kept.stop_token_id = sequence.params.end(token_id, num_tokens, eos)
        if kept.finish_reason is not None:
            break
    return kept


def failure(sequence: SequenceState, problem: str) -> tuple[ErrorKind, str]:
    """Why no token has a finite score; `problem` is what its grammar failed at."""
    if sequence.params.grammar is not None:
        place = len(sequence.output_token_ids)
        reason = f"the structured output cannot go on: no token may follow its {place} tokens"
        return "grammar", f"{reason} ({problem})" if problem else reason
    return "internal", "no token has a finite score (every token forbidden, or the model computed NaN)"


def token_output(sequence: SequenceState, kept: Kept, outcome: Outcome) -> TokenOutput:
    """The message for a sequence that got tokens."""
    assert outcome.verdict is not None
    is_first = sequence.first_token_time is None
    draft = outcome.draft
    logprobs = outcome.verdict.logprobs[: len(kept.token_ids)]
    return TokenOutput(
        request_id=sequence.request_id,
        token_ids=kept.token_ids,
        position=len(sequence.output_token_ids) - len(kept.token_ids),
        finish_reason=kept.finish_reason,
        stop_token_id=kept.stop_token_id,
        logprobs=[entry for entry in logprobs if entry is not None] or None,
        prompt_logprobs=(logprobs_pages(sequence.prompt_logprobs) or None) if is_first else None,
        cached_tokens=sequence.num_cached if is_first else None,
        timing=_first_token_timing(sequence) if is_first else None,
        drafted_tokens=draft.num_nodes if draft is not None else 0,
        predicted_tokens=min(draft.num_predicted, draft.num_nodes) if draft is not None else 0,
        accepted_tokens=outcome.num_accepted,
    )


def _first_token_timing(sequence: SequenceState) -> RequestTiming:
    sequence.first_token_time = time.monotonic()
    scheduled = sequence.first_scheduled or sequence.arrival
    return RequestTiming(
        queue_s=scheduled - sequence.arrival, prefill_s=sequence.first_token_time - scheduled
    )
