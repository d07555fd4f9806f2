"""Log lines about requests: their ids, how they ended, and where their time went."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from protocol.outputs import TransferTiming
from router.errors import ApiError
from router.observe.timing import choice_timing
from router.requests.journal import Generation, LiveRequest

logger = logging.getLogger(__name__)


class RequestLog:
    """Logs how each request ended, at the level info if `on`, else at debug."""

    def __init__(self, on: bool) -> None:
        self._level = logging.INFO if on else logging.DEBUG

    def finished(self, request: LiveRequest, now: float) -> None:
        """`now` is in monotonic seconds."""
        if logger.isEnabledFor(self._level):
            about = {
                "finish_reason": request.choice.finish_reason,
                "prompt_tokens": len(request.choice.prompt.token_ids),
                "timing": msgspec.structs.asdict(choice_timing(request)),
            }
            logger.log(self._level, "%s", describe(request, now), extra=ids(request) | about)

    def failed(self, generation: Generation, error: ApiError) -> None:
        """Log an error for each request of the generation, also if its client went away."""
        for request in generation.requests:
            about = {"status": error.status, "code": error.code, "tokens": request.choice.num_tokens}
            logger.log(
                self._level,
                "request %s failed after %d tokens: %s",
                request.request_id,
                request.choice.num_tokens,
                error.message,
                extra=ids(request) | about,
            )


def ids(request: LiveRequest) -> dict[str, Any]:
    """Return the ids of a log line: `request_id` is the workers' id of the request, which changes with each
    placement, and `http_request_id` is its client's (`x-request-id`).
    """
    return {"request_id": request.request_id, "http_request_id": request.generation.http_id}


def describe(request: LiveRequest, now: float) -> str:
    """Return one line about a request that has ended. `now` is in monotonic seconds."""
    timing, arrival, choice = request.timing, request.generation.arrival, request.choice
    first = request.first_token_time if request.output_token_ids else now
    parts = [
        f"request {request.request_id} (x-request-id {request.generation.http_id}): {choice.finish_reason}",
        f"{len(choice.prompt.token_ids)} tokens in, {choice.num_tokens} out",
        f"first after {_ms(first - arrival)}, last after {_ms(now - arrival)}",
        f"queue {_ms(timing.queue_s)}",
        f"prefill {_ms(timing.prefill_s)}",
    ]
    if choice.drafted_tokens:
        where = " and ".join(dict.fromkeys(each.decision.place.where for each in request.drafts.periods))
        parts.append(f"drafted {choice.drafted_tokens}, accepted {choice.accepted_tokens}")
        parts += [f"by the plan {where}"] if where else []
    if timing.transfer is not None:
        parts.append(_way(timing.transfer))
    return ", ".join(parts)


def _way(transfer: TransferTiming) -> str:
    way = f"reserve {_ms(transfer.reserve_s)}, "
    if transfer.transport:
        way += (
            f"transfer {_ms(transfer.transfer_s)}: "
            f"{transfer.transferred_bytes} bytes over {transfer.transport}, "
            f"exposed {_ms(transfer.exposed_s)}, waited {_ms(transfer.wait_s)}, "
        )
    return way + f"hand-off {_ms(transfer.handoff_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
