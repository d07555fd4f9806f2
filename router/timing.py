"""The timing record of an answer: where its seconds went, who worked on it and what it drafted."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.roles import Task
from router.journal import Generation, LiveRequest


class ChoiceTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. With the answer's `prepare_s` its stages add up to `total_s`.

    queue_s: parked until a worker could take it; placement_s: choosing the workers; earlier_s: in placements
    that it was taken from. Then, at the workers that it ended at: worker_queue_s and prefill_s up to the
    first token, takeover_s from there to the decode worker's first output, decode_s to the last token.
    Beside the stages, ttft_s is from the arrival to the first token that the client got, decode_queue_s the
    part of the hand-off in which the decode worker had all and its step was still to begin.
    """

    index: int
    mode: Literal["whole", "split"]
    workers: dict[Task, str]
    queue_s: float
    placement_s: float
    earlier_s: float
    worker_queue_s: float
    prefill_s: float
    takeover_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    decode_queue_s: float
    transfer: dict[str, Any] | None
    tokens: int
    decode_steps: int
    drafted_tokens: int
    accepted_tokens: int
    placed_anew: int
    migrated: int
    redirected: int


class ResponseTiming(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, in seconds from its arrival; prepare_s is for reading, checking and tokenizing."""

    prepare_s: float
    total_s: float
    choices: list[ChoiceTiming]


def response_timing(generation: Generation) -> ResponseTiming:
    """Of an answer that is complete."""
    choices = [_choice_timing(request) for request in generation.requests]
    return ResponseTiming(
        prepare_s=generation.started - generation.arrival,
        total_s=max(choice.total_s for choice in choices),
        choices=choices,
    )


def _choice_timing(request: LiveRequest) -> ChoiceTiming:
    times, timing, choice = request.times, request.timing, request.choice
    arrival = request.generation.arrival
    decoding_since = times.taken_over_at or times.answered_at
    return ChoiceTiming(
        index=choice.index,
        mode="split" if "prefill" in request.workers else "whole",
        workers=dict(request.workers),
        queue_s=times.queue_s,
        placement_s=times.placement_s,
        earlier_s=times.earlier_s,
        worker_queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        takeover_s=decoding_since - times.answered_at,
        decode_s=times.ended_at - decoding_since if decoding_since else 0.0,
        ttft_s=request.first_token_time - arrival,
        total_s=times.ended_at - arrival,
        decode_queue_s=timing.decode_queue_s,
        transfer=None if timing.transfer is None else msgspec.structs.asdict(timing.transfer),
        tokens=choice.num_tokens,
        decode_steps=times.num_steps,
        drafted_tokens=choice.drafted_tokens,
        accepted_tokens=choice.accepted_tokens,
        placed_anew=times.num_placed_anew,
        migrated=times.num_migrated,
        redirected=request.redirects,
    )
