"""The life of requests: their start and end, their tokens, and new placements when a worker fails."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal, NoReturn

from protocol.outputs import ErrorKind, TokenOutput
from protocol.router_to_worker import Abort, Redirect
from protocol.worker_to_router import HandoverFailed, StepOutput
from router.dispatch import Core
from router.dispatch.placer import Placer
from router.dispatch.races import Races
from router.errors import ApiError, client_gone, failed_generation, not_placed, unavailable
from router.observe.metrics import RefusalReason
from router.observe.timing import RequestLog, ids
from router.requests.journal import Generation, LiveRequest
from router.requests.slices import SLICE_S
from router.workers.assignment import Assignment, Stage
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Most placements of a request that may be lost before they sent a token.

The request itself may be what kills workers, so retries are bounded. Placements whose worker had sent a token
do not count, and a token from a decode worker resets the count: a request that makes progress survives any
number of deaths. Workers that fell silent do not count either: their whole process was stopped, since
heartbeats have their own thread, which no request can block.
"""

Cause = ErrorKind | Literal["drain", "thinking", "raced"]
_REPLACEABLE = ("worker_lost", "transfer")


class Dispatcher:
    """The dispatcher of all requests. Runs on the event loop only."""

    def __init__(self, core: Core, placer: Placer) -> None:
        self._config, self._journal, self._registry, self._metrics, self._send = core
        self._placer = placer
        self.races = Races(
            core, placer, lambda request: self.place_again(request, "raced", "its worker is suspect")
        )
        self._log = RequestLog(core.config.enable_log_requests)

    async def start(self, generation: Generation) -> None:
        """Place all sequences, or none and raise `ApiError` if there is no room or no worker.

        Other tasks get a turn after every few sequences; the generation may end before all are placed.
        """
        generation.started = time.monotonic()
        gives_way = self._gives_way(generation)
        turn_ends = time.perf_counter() + SLICE_S
        for request in generation.requests:
            if time.perf_counter() >= turn_ends:
                await asyncio.sleep(0)
                if generation.is_over:
                    return
                turn_ends = time.perf_counter() + SLICE_S
            refusal = self._placer.place(request, checks_slo=request is generation.requests[0])
            if refusal is not None:
                self._placer.meter.refused(refusal, self._registry.live())
                self._refuse(generation, refusal.missed or "no_worker", not_placed(refusal))
        for other in gives_way:
            self._metrics.count("requests_refused_total", "shed")
            self.fail(other, self._queue_is_full("a more urgent one came, and "))
        left = max(0.0, generation.deadline - time.monotonic())
        generation.timeout = asyncio.get_running_loop().call_later(left, self._timed_out, generation)

    def _gives_way(self, newcomer: Generation) -> list[Generation]:
        """Return the generations to shed for a newcomer: the least urgent ones that have no token yet.

        Raises `ApiError` if too few are less urgent than the newcomer.
        """
        excess = len(self._journal) + len(newcomer.requests) - self._config.max_queued_requests
        shed: list[Generation] = []
        others = self._journal.less_urgent(newcomer.priority) if excess > 0 else []
        for other in others:
            if excess > 0:
                shed.append(other)
                excess -= other.num_unfinished
        if excess > 0:
            self._refuse(newcomer, "queue_full", self._queue_is_full())
        return shed

    def _queue_is_full(self, why: str = "") -> ApiError:
        limit = self._config.max_queued_requests
        reason = f"{why}more than --max-queued-requests={limit} requests are unfinished"
        return ApiError(429, reason, code="overloaded", retry_after_s=1.0)

    def _refuse(self, generation: Generation, reason: RefusalReason, error: ApiError) -> NoReturn:
        self._metrics.count("requests_refused_total", reason)
        self._metrics.count("request_failures_total", "overloaded")
        self._placer.withdraw(generation.requests)
        generation.error = error
        raise error

    def send_waiting(self) -> None:
        """Send the waiting requests whose workers have room now."""
        if self._placer.num_parked:
            self.resume_parked()
        for request in self._placer.ahead.send_waiting():
            assert request.assignment is not None
            reason = f"worker {request.assignment.first.key.worker_id} cannot be reached"
            self._place_again_or_fail(request, "worker_lost", reason, counts=False)

    def resume_parked(self) -> None:
        """Place the requests that waited for a worker. Fail those that no worker will ever serve."""
        while (left := self._placer.resume()) is not None:
            request, refusal = left
            self.fail(request.generation, unavailable(refusal.reason))

    def cancel(self, generation: Generation) -> None:
        """End a generation whose client has gone or has its whole answer."""
        self.fail(generation, client_gone())
        self.send_waiting()

    def fail(self, generation: Generation, error: ApiError) -> None:
        if generation.is_over:
            return
        generation.error = error
        for choice in generation.choices:
            choice.fail()
        self._metrics.count("request_failures_total", error.code)
        self._log.failed(generation, error)
        self._placer.withdraw(generation.requests)
        self._close(generation)
        generation.notify()

    def fail_all(self, error: ApiError) -> None:
        for request in self._journal:
            self.fail(request.generation, error)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Place the lost worker's requests again, and name another decode worker for prompts in prefill."""
        message = f"worker {worker.key.worker_id} was lost: {reason}"
        was_stopped = worker.silence_s > self._config.worker_timeout and not worker.is_stalled
        self.races.worker_lost(worker)
        for request, at in self._journal.assigned():
            if worker is at.decode and at.prefill is not None:
                self.redirect(request, "worker_lost", message)
            elif worker in at.holders:
                had_it = at.stage is not Stage.HELD and worker is not at.answered_by
                self._place_again_or_fail(request, "worker_lost", message, counts=had_it and not was_stopped)

    def lost(self, request: LiveRequest, at: Assignment, reason: str) -> None:
        """Place a request again that its worker (`Assignment.worker`) turned out not to have."""
        self._place_again_or_fail(request, "worker_lost", reason, counts=at.worker is not at.answered_by)

    def handover_failed(self, message: HandoverFailed) -> None:
        """Handle a prefill worker's report that the decode worker did not take over a prompt."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        request = self._journal.get(message.request_id)
        if worker is None:
            self._metrics.count("messages_dropped_total", "stale_incarnation")
        elif request is None:
            self._metrics.count("messages_dropped_total", "unknown_request")
            self._send(worker, Abort(request_ids=[message.request_id]))
        elif (at := request.current) is None or at.decode.key.incarnation != message.decode_incarnation:
            self._metrics.count("messages_dropped_total", "redirected_before")
        elif worker is at.prefill:
            may_ask_again = message.error_kind == "transfer" and not message.manifest_sent
            self.redirect(request, message.error_kind, message.reason, may_ask_again)
        elif worker is at.first:
            # Tokens of the decode worker came before this report, so it runs the request, and the prefill
            # worker has told it to abort.
            self._send(worker, Abort(request_ids=[message.request_id]))
            self._place_again_or_fail(request, "transfer", message.reason)
        else:
            self._metrics.count("messages_dropped_total", "not_the_holder")

    def step(self, message: StepOutput) -> None:
        """Pass one step's tokens to their requests."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        if worker is None:
            self._metrics.count("messages_dropped_total", "stale_incarnation")
            return
        now = time.monotonic()
        worker.silence_s = 0.0
        num_tokens = 0
        unknown: list[str] = []
        for output in message.outputs:
            request = self._journal.get(output.request_id)
            if request is None:
                self._metrics.count("messages_dropped_total", "unknown_request")
                if output.finish_reason is None:
                    unknown.append(output.request_id)
            elif (at := request.assignment) is None or not at.is_sent_to(worker):
                self._metrics.count("messages_dropped_total", "not_the_holder")
            elif output.finish_reason in ("error", "abort"):
                kind = output.error_kind or "internal"
                reason = output.error or f"worker {worker.key.worker_id} gave the request up"
                self._place_again_or_fail(request, kind, reason)
            elif request.owner is None or self.races.is_first(request, output):
                num_tokens += self._handle_or_fail(request, at, worker, output, now)
        if self._journal.copies:
            self.races.settle()
        if unknown:  # an abort got lost, or crossed this message
            self._send(worker, Abort(request_ids=unknown))
        if num_tokens:
            self._metrics.count("generation_tokens_total", by=num_tokens)
        self.send_waiting()

    def _handle_or_fail(
        self, request: LiveRequest, at: Assignment, worker: Worker, output: TokenOutput, now: float
    ) -> int:
        """Handle one output. An error fails only its request. Return the tokens that the answer gained."""
        if worker is not at.first and not at.has_answered:
            request.early.append(output)
            return 0
        num_before = request.choice.num_tokens
        try:
            self._handle(request, worker, output, now)
            while request.early and self._journal.get(request.request_id):
                self._handle(request, at.decode, request.early.pop(0), now)
        except Exception:  # one request's output must not take the others down
            logger.exception("request %s failed in the router", request.request_id, extra=ids(request))
            self.fail(request.generation, failed_generation("internal", "the router failed on this request"))
        return request.choice.num_tokens - num_before

    def _handle(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        complaint = request.complaint(output)
        if complaint is not None:
            self._metrics.count("messages_dropped_total", "malformed")
            reason = f"worker {worker.key.worker_id} {complaint}"
            self.fail(request.generation, failed_generation("internal", reason))
            return
        if output.token_ids and output.position != len(request.output_token_ids):
            self._metrics.count("messages_dropped_total", "tokens_missing")
            here, there = len(request.output_token_ids), output.position
            reason = f"worker {worker.key.worker_id} sent token {there} where token {here} comes next"
            self._place_again_or_fail(request, "worker_lost", reason)
            return
        cut = request.past_budget(output)
        output = cut or output
        if output.token_ids:
            self._count_tokens(request, worker, output, now)
        choice = request.choice
        choice.push(output)
        if output.timing is not None:
            request.note(output.timing)
            self._metrics.observe_timing(output.timing)
        if choice.finish_reason is not None:
            request.times.ended_at = now
            if output.finish_reason is None:
                self._placer.abort([request])
            self._placer.finished(request, now)
            if (copy := self._journal.copies.get(request)) is not None:
                self._placer.withdraw([copy])
            self._journal.remove(request)
            self._metrics.request_finished(request, now)
            self._log.finished(request)
            generation = request.generation
            generation.num_unfinished -= 1
            if not generation.num_unfinished:
                self._metrics.generation_finished(generation)
            if generation.is_over:
                self._close(generation)
        elif cut is not None and not self._has_ended(request, now):
            # The worker generated other tokens after the point where the router ended the thinking.
            self.place_again(request, "thinking", "its thinking was ended")
        request.generation.notify()

    def _count_tokens(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        at, num_before = request.assignment, len(request.output_token_ids)
        assert at is not None
        if not at.is_decoding:
            self._advance(request, at, worker, now)
        if not num_before:
            request.first_token_time = now
            self._metrics.first_token(request, now)
        else:
            request.times.num_steps += 1
            self._metrics.inter_token_latency.observe(now - request.last_token_time)
        request.last_token_time = now
        request.output_token_ids.extend(output.token_ids)

    def _advance(self, request: LiveRequest, at: Assignment, worker: Worker, now: float) -> None:
        """Record a first token: from the first worker, or from the decode worker after a hand-off."""
        if not at.has_answered:
            request.times.answered_at = now
            self._placer.answered(request, at, now)
        if worker is at.decode:
            request.failures = 0
            if not at.is_decoding:
                request.times.taken_over_at = now
                self._placer.loads.taken_over(at)

    def _place_again_or_fail(
        self, request: LiveRequest, kind: ErrorKind, reason: str, *, counts: bool = True
    ) -> None:
        """Place the request again, with its tokens so far, or fail it."""
        if request.generation.is_over:
            return
        if request.owner is not None:
            self.place_again(request, "worker_lost", reason)
            return
        request.failures += counts
        if kind not in _REPLACEABLE:
            self.fail(request.generation, failed_generation(kind, reason))
        elif self._has_ended(request, time.monotonic()):
            return
        elif request.failures >= MAX_FAILURES:
            self.fail(request.generation, failed_generation(kind, reason))
        else:
            self.place_again(request, kind, reason)

    def _has_ended(self, request: LiveRequest, now: float) -> bool:
        """End the request if its tokens so far complete it. Return whether they do."""
        at, model = request.current, self._registry.model
        end = request.end(model.eos_token_ids if model is not None else ())
        if at is None or end is None:
            return False
        self._placer.abort([request])
        self._handle(request, at.worker, end, now)
        return True

    def place_again(self, request: LiveRequest, cause: Cause, reason: str) -> None:
        """Assign a request, with its tokens so far, to other workers. Fail it if no worker can serve it.

        If the request has a copy that races, the copy replaces it. A copy itself is only withdrawn.
        """
        if (successor := self.races.successor(request)) is not None:
            self.races.won(successor)
            request, refusal = successor, None
        else:
            self._placer.withdraw([request])
            if request.owner is not None:
                return
            refusal = self._placer.place(request)
        if refusal is not None:
            kind = "worker_lost" if cause == "drain" or cause == "thinking" or cause == "raced" else cause
            self.fail(request.generation, failed_generation(kind, f"{reason}; {refusal.reason}"))
            return
        how = "parked" if request.current is None else "placed again"
        level = logging.INFO if cause == "thinking" else logging.WARNING
        facts = how, request.request_id, request.num_emitted_before, reason
        logger.log(level, "%s as %s after %d tokens: %s", *facts, extra=ids(request))
        request.times.num_placed_again += 1
        self._metrics.count("requests_placed_again_total", cause)

    def redirect(
        self,
        request: LiveRequest,
        kind: ErrorKind | Literal["drain"],
        reason: str,
        may_ask_again: bool = False,
    ) -> None:
        """Name another decode worker to the prefill worker, which keeps the KV blocks of the prompt.

        If there is no other, the prefill worker decodes the request itself.
        """
        at = request.current
        if at is None or at.prefill is None or at.stage is Stage.HELD:
            self.place_again(request, kind, reason)
            return
        prefill, failed = at.prefill, at.decode
        may_ask_again = may_ask_again and failed.key.incarnation not in request.failed
        request.failed.add(failed.key.incarnation)
        target = self._placer.next_decode(request, prefill, failed if may_ask_again else None)
        to, key = None if target is prefill else target.address, prefill.key
        message = Redirect(incarnation=key.incarnation, request_id=request.request_id, decode=to)
        if not self._send(prefill, message):
            reason = f"{reason}; worker {prefill.key.worker_id} cannot be reached"
            self._place_again_or_fail(request, "worker_lost", reason, counts=False)
            return
        decoder = target.key.worker_id
        facts = request.request_id, decoder, reason
        logger.warning("request %s: %s decodes it: %s", *facts, extra=ids(request))
        request.redirects += 1
        request.early.clear()
        self._placer.loads.redirect(at, target)
        if target is not failed:
            self._send(failed, Abort(request_ids=[request.request_id]))
        if target is prefill:
            self._metrics.count("handoff_takeovers_total", kind)
        else:
            self._metrics.count("handoff_redirects_total", kind)

    def _timed_out(self, generation: Generation) -> None:
        limit = self._config.request_timeout
        self.fail(generation, ApiError(504, f"the request took longer than {limit:g} s", code="timeout"))

    def _close(self, generation: Generation) -> None:
        if generation.timeout is not None:
            generation.timeout.cancel()
