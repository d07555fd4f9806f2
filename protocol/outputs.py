"""Workers' results: tokens, finish reasons and timings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.ids import Count, Id, Seconds, ShortText, TokenIds

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorKind = Literal["invalid", "overloaded", "timeout", "worker_lost", "transfer", "grammar", "internal"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the token's own, its rank, then the likeliest tokens', best first.

    Without `gc=False` the garbage collector would visit the tens of thousands in an answer, and stop a
    router's event loop for 100 ms.
    """

    logprob: float
    rank: int
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []


PAGE_POSITIONS = 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TokenLogprobs | None]).decode


def logprobs_pages(entries: Sequence[TokenLogprobs | None]) -> list[bytes]:
    """Pack log-probabilities (a prompt may have millions) into pages that are unpacked one by one."""
    starts = range(0, len(entries), PAGE_POSITIONS)
    return [_encode(entries[start : start + PAGE_POSITIONS]) for start in starts]


def paged_logprobs(pages: Iterable[bytes]) -> Iterator[TokenLogprobs | None]:
    """Unpack pages. Raises `msgspec.DecodeError`."""
    for page in pages:
        yield from _decode(page)


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Timing of a prompt's transfer from its prefill worker to its decode worker, in seconds and bytes.

    reserve_s: from the request for blocks to their grant. transfer_s: from the first push until all blocks
    were in place; exposed_s is its part after the prompt was computed. wait_s: time that pieces waited for
    their turn on the wire, summed. handoff_s: from the last block's arrival to the first decode step. Nothing
    is pushed if the decode worker has all blocks: then `transport` is empty, and handoff_s counts from the
    manifest.
    """

    transport: Annotated[str, Meta(max_length=128)] = ""
    transferred_bytes: Count = 0
    reserve_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    exposed_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    handoff_s: Seconds = 0.0


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Timing of a request on one worker, in seconds.

    A decode worker that took the request over sends `transfer` with its first token, and `decode_queue_s`:
    the time from having all of the request to its first step.
    """

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_queue_s: Seconds = 0.0
    transfer: TransferTiming | None = None


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step's result for one request.

    `position` counts the answer's tokens before this output. `cached_tokens` comes with a sequence's first
    token. The step verified `drafted_tokens` draft tokens and accepted `accepted_tokens`; the first
    `predicted_tokens` draft tokens came from the client's prediction. `prompt_logprobs` are pages.
    `embedding` is the prompt's, little-endian float32.
    """

    request_id: Id
    token_ids: TokenIds
    position: Count = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[bytes] | None = None
    cached_tokens: int | None = None
    timing: RequestTiming | None = None
    drafted_tokens: Count = 0
    predicted_tokens: Count = 0
    accepted_tokens: Count = 0
    embedding: Annotated[bytes, Meta(max_length=2**20)] | None = None
    error_kind: ErrorKind | None = None
    error: ShortText | None = None
