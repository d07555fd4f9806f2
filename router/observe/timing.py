"""The timing record of an answer (stages, workers and drafts), and the log of finished requests."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import msgspec

from router.errors import ApiError
from router.requests.journal import Generation, LiveRequest


class TimedStage(NamedTuple):
    """A stage of one request, in monotonic seconds of the router."""

    name: str
    began: float
    ended: float
    attributes: dict[str, Any]


def stages(generation: Generation) -> list[TimedStage]:
    """Return the stages reached so far. Durations measured by workers end when their tokens arrived."""
    found = [TimedStage("prepare", generation.arrival, generation.started, {})]
    for request in generation.requests:
        found += _stages(request)
    return found


def span_attributes(generation: Generation) -> dict[str, Any]:
    """Return the attributes of the request's span, with vLLM's names where vLLM has them, for all choices."""
    requests = generation.requests
    prompt_tokens = {id(choice.prompt): len(choice.prompt.token_ids) for choice in generation.choices}
    firsts = [request.first_token_time for request in requests if request.first_token_time]
    found: dict[str, Any] = {
        "gen_ai.request.n": len(requests),
        "gen_ai.usage.prompt_tokens": sum(prompt_tokens.values()),
        "gen_ai.usage.completion_tokens": sum(choice.num_tokens for choice in generation.choices),
        "gen_ai.latency.e2e": time.monotonic() - generation.arrival,
        "tandem.drafted_tokens": sum(choice.drafted_tokens for choice in generation.choices),
        "tandem.accepted_tokens": sum(choice.accepted_tokens for choice in generation.choices),
        "tandem.draft_replans": sum(request.drafts.num_replans for request in requests),
        "tandem.decode_steps": sum(request.times.num_steps for request in requests),
        "tandem.placed_again": sum(request.times.num_placed_again for request in requests),
        "tandem.migrated": sum(request.times.num_migrated for request in requests),
        "tandem.redirected": sum(request.redirects for request in requests),
    }
    if firsts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts) - generation.arrival
    return found


def _stages(request: LiveRequest) -> list[TimedStage]:
    times, timing = request.times, request.timing
    about: dict[str, Any] = {"tandem.choice": request.choice.index}
    found: list[TimedStage] = []
    if times.earlier_s:
        started = request.generation.started
        found.append(TimedStage("earlier", started, started + times.earlier_s, about))
    placing = times.placed_at - times.placement_s
    if times.queue_s and times.placed_at:
        found.append(TimedStage("queue", placing - times.queue_s, placing, about))
    if times.placed_at:
        workers = {f"tandem.{task}_worker": worker for task, worker in request.worker_ids.items()}
        mode: dict[str, str] = {"tandem.mode": _mode(request)}
        if request.drafts.periods:
            mode["tandem.drafts"] = request.drafts.periods[-1].decision.place.where
        found.append(TimedStage("placement", placing, times.placed_at, about | workers | mode))
    if not times.answered_at:
        return found
    prefilling = times.answered_at - timing.prefill_s
    found.append(TimedStage("worker_queue", prefilling - timing.queue_s, prefilling, about))
    found.append(TimedStage("prefill", prefilling, times.answered_at, about))
    decoding = times.taken_over_at or times.answered_at
    if timing.transfer is not None:
        transfer = timing.transfer
        moved = {f"tandem.transfer.{name}": value for name, value in msgspec.structs.asdict(transfer).items()}
        arrived = times.answered_at + transfer.exposed_s
        decoding = arrived + transfer.handoff_s
        found.append(TimedStage("transfer", arrived - transfer.transfer_s, arrived, about | moved))
        found.append(TimedStage("decode_queue", decoding - timing.decode_queue_s, decoding, about))
    found.append(TimedStage("decode", decoding, max(decoding, request.last_token_time), about))
    return found


def response_timing(generation: Generation) -> dict[str, Any]:
    """Return the field `timing` of a complete answer. prepare_s: reading and tokenizing the request."""
    choices = [choice_timing(request) for request in generation.requests]
    prepare_s = generation.started - generation.arrival
    total_s = max(choice["total_s"] for choice in choices)
    return {"timing": {"prepare_s": prepare_s, "total_s": total_s, "choices": choices}}


def choice_timing(request: LiveRequest) -> dict[str, Any]:
    """Return the timing of one sequence. With the answer's `prepare_s` its stages add up to `total_s`.

    queue_s: parked until a worker had room; placement_s: choice of the workers; earlier_s: earlier
    placements. At the final workers: worker_queue_s and prefill_s until the first token, takeover_s from then
    to the decode worker's first output, decode_s until the last token. In addition, ttft_s is the time to the
    client's first token, and decode_queue_s the part of the hand-off in which the decode worker ended its
    current step. `drafts`: the draft plans with their results.
    """
    times, timing, choice = request.times, request.timing, request.choice
    arrival = request.generation.arrival
    decoding_since = times.taken_over_at or times.answered_at
    return {
        "index": choice.index,
        "mode": _mode(request),
        "workers": request.worker_ids,
        "queue_s": times.queue_s,
        "placement_s": times.placement_s,
        "earlier_s": times.earlier_s,
        "worker_queue_s": timing.queue_s,
        "prefill_s": timing.prefill_s,
        "takeover_s": decoding_since - times.answered_at,
        "decode_s": times.ended_at - decoding_since if decoding_since else 0.0,
        "ttft_s": request.first_token_time - arrival,
        "total_s": times.ended_at - arrival,
        "decode_queue_s": timing.decode_queue_s,
        "transfer": None if timing.transfer is None else msgspec.structs.asdict(timing.transfer),
        "tokens": choice.num_tokens,
        "decode_steps": times.num_steps,
        "drafted_tokens": choice.drafted_tokens,
        "accepted_tokens": choice.accepted_tokens,
        "drafts": request.drafts.periods_as_json(),
        "placed_again": times.num_placed_again,
        "migrated": times.num_migrated,
        "redirected": request.redirects,
    }


def _mode(request: LiveRequest) -> str:
    return "split" if "prefill" in request.worker_ids else "whole"


logger = logging.getLogger(__name__)


class RequestLog:
    """The log of how each request ended, at level info if `on`, else at debug."""

    def __init__(self, on: bool) -> None:
        self._level = logging.INFO if on else logging.DEBUG

    def finished(self, request: LiveRequest) -> None:
        if not logger.isEnabledFor(self._level):
            return
        timing = choice_timing(request)
        reason, num_prompt = request.choice.finish_reason, len(request.choice.prompt.token_ids)
        about = {"finish_reason": reason, "prompt_tokens": num_prompt, "timing": timing}
        logger.log(
            self._level,
            "request %s (x-request-id %s): %s, prompt_tokens %d, %s",
            request.request_id,
            request.generation.http_id,
            about["finish_reason"],
            about["prompt_tokens"],
            ", ".join(f"{name} {_shown(value)}" for name, value in timing.items() if value),
            extra=ids(request) | about,
        )

    def failed(self, generation: Generation, error: ApiError) -> None:
        """Log an error for each request of the generation, also if its client is gone."""
        for request in generation.requests:
            about = {"status": error.status, "code": error.code, "tokens": request.choice.num_tokens}
            failed = "request %s failed after %d tokens: %s"
            facts = request.request_id, request.choice.num_tokens, error.message
            logger.log(self._level, failed, *facts, extra=ids(request) | about)


def ids(request: LiveRequest) -> dict[str, Any]:
    """Return the ids for a log line: `request_id` is the workers' id, which changes with each placement,
    `http_request_id` the client's (`x-request-id`).
    """
    return {"request_id": request.request_id, "http_request_id": request.generation.http_id}


def _shown(value: object) -> object:
    if isinstance(value, list):
        return " and ".join(dict.fromkeys(plan["where"] for plan in value))
    return f"{value:.4g}" if isinstance(value, float) else value
