"""One line about a request that has ended: what it was, and where its time went."""

from __future__ import annotations

from protocol.messages import TransferTiming
from router.journal import LiveRequest


def describe(request: LiveRequest, now: float) -> str:
    """`now` in monotonic seconds."""
    timing, arrival, choice = request.timing, request.generation.arrival, request.choice
    first = request.first_token_time if request.output_token_ids else now
    parts = [
        f"request {request.request_id}: {choice.finish_reason}",
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
