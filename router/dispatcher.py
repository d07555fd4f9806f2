"""Places requests, sends them to the workers, and hands the workers' tokens to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NoReturn

import msgspec

from protocol.config import ServeConfig
from protocol.ids import new_request_id
from protocol.messages import Abort, ErrorKind, Generate, StepOutput, TokenOutput
from router.errors import ApiError, failed_generation
from router.journal import Generation, Journal, LiveRequest
from router.metrics import Metrics
from router.placement.interface import Decision, PlacementPolicy, Refusal, RequestFacts
from router.registry import Registry, Worker

logger = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
_REPLACEABLE = ("worker_lost", "transfer")

Send = Callable[[Worker, msgspec.Struct], bool]


class Dispatcher:
    """Runs on the event loop alone. `send` queues a message and says whether the worker can be reached."""

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        registry: Registry,
        policy: PlacementPolicy,
        metrics: Metrics,
        send: Send,
    ) -> None:
        self._config = config
        self._journal = journal
        self._registry = registry
        self._policy = policy
        self._metrics = metrics
        self._send = send

    def start(self, generation: Generation) -> None:
        """Send all its sequences off, or none and raise `ApiError` when there is no room or no worker."""
        limit = self._config.max_queued_requests
        if len(self._journal) + len(generation.requests) > limit:
            reason = f"more than --max-queued-requests={limit} requests are unfinished"
            self._refuse(generation, ApiError(429, reason, retry_after_s=1.0))
        for request in generation.requests:
            refusal = self._place(request)
            if refusal is not None:
                error = ApiError(503, refusal.reason, retry_after_s=refusal.retry_after_s)
                self._refuse(generation, error)
        loop = asyncio.get_running_loop()
        generation.timeout = loop.call_later(self._config.request_timeout, self._timed_out, generation)

    def _refuse(self, generation: Generation, error: ApiError) -> NoReturn:
        self._metrics.failed("overloaded")
        self._forget(generation.requests)
        generation.error = error
        raise error

    def cancel(self, generation: Generation) -> None:
        """The client is gone."""
        if not generation.is_over:
            generation.is_disconnected = True
            self._finish_failed(generation, "abort")

    def fail(self, generation: Generation, error: ApiError) -> None:
        if not generation.is_over:
            generation.error = error
            self._finish_failed(generation, error.code)

    def fail_all(self, error: ApiError) -> None:
        for request in self._journal:
            self.fail(request.generation, error)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Place its requests anew where no token was emitted, fail them where the rest is lost."""
        message = f"worker {worker.key.worker_id} was lost: {reason}"
        for request in self._journal:
            if worker in request.holders:
                self._place_anew_or_fail(request, "worker_lost", message)

    def step(self, message: StepOutput) -> None:
        """Hand one step's tokens to their requests."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        if worker is None:
            self._metrics.dropped("stale_incarnation")
            return
        now = worker.last_seen = time.monotonic()
        num_tokens = 0
        for output in message.outputs:
            request = self._journal.get(output.request_id)
            if request is None:
                self._metrics.dropped("unknown_request")
            elif worker is not request.prefill and worker is not request.decode:
                self._metrics.dropped("not_the_holder")
            elif output.finish_reason in ("error", "abort"):
                kind = output.error_kind or "internal"
                reason = output.error or f"worker {worker.key.worker_id} gave the request up"
                self._place_anew_or_fail(request, kind, reason)
            else:
                num_tokens += len(output.token_ids)
                self._take_or_fail(request, worker, output, now)
        if num_tokens:
            self._metrics.generation_tokens.inc(num_tokens)

    def _take_or_fail(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        if request.is_early(worker):
            request.early.append(output)
            return
        try:
            self._take(request, worker, output, now)
            while request.early and request.decode is not None and self._journal.get(request.request_id):
                self._take(request, request.decode, request.early.pop(0), now)
        except Exception:  # one request's output must not take the others down
            logger.exception("request %s failed in the router", request.request_id)
            self.fail(request.generation, failed_generation("internal", "the router failed on this request"))

    def _take(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        complaint = _complaint(request, output)
        if complaint is not None:
            self._metrics.dropped("malformed")
            reason = f"worker {worker.key.worker_id} {complaint}"
            self.fail(request.generation, failed_generation("internal", reason))
            return
        if output.token_ids:
            self._account_tokens(request, worker, output, now)
        choice = request.choice
        choice.add(output)
        if output.timing is not None:
            self._metrics.observe_timing(output.timing)
        if choice.finish_reason is not None:
            if output.finish_reason is None:
                self._abort([request])
            self._release(request)
            self._journal.remove(request)
            self._metrics.request_finished(request, now)
            generation = request.generation
            generation.num_unfinished -= 1
            if generation.is_over:
                self._close(generation)
        request.generation.notify()

    def _account_tokens(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        if not request.has_started:
            request.first_token_time = now
            (request.prefill or worker).outstanding_prefill_tokens -= len(request.choice.prompt.token_ids)
            self._metrics.first_token(request, now)
        else:
            self._metrics.inter_token_latency.observe(now - request.last_token_time)
        if request.prefill is not None and worker is request.decode:
            request.prefill.outstanding_requests -= 1
            request.prefill = None
        request.last_token_time = now
        request.output_token_ids.extend(output.token_ids)

    def _place(self, request: LiveRequest) -> Refusal | None:
        prompt_tokens = len(request.choice.prompt.token_ids)
        facts = RequestFacts(
            num_prompt_tokens=prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            priority=request.generation.priority,
            disaggregate=self._config.disaggregation,
        )
        decision = self._policy(facts, [worker.snapshot() for worker in self._registry.live()])
        if isinstance(decision, Refusal):
            return decision
        request.placements += 1
        request.early.clear()
        prefill = self._registry.get(decision.prefill) if decision.prefill else None
        decode = self._registry.get(decision.decode)
        if decode is None:
            return Refusal(f"the policy chose {decision.decode}, which is not known")
        request.prefill, request.decode = prefill, decode
        for worker in request.holders:
            worker.outstanding_requests += 1
        first = prefill or decode
        first.outstanding_prefill_tokens += prompt_tokens
        self._journal.add(request)
        logger.debug("request %s: %s", request.request_id, decision)
        return self._dispatch(request, first, decision)

    def _dispatch(self, request: LiveRequest, worker: Worker, decision: Decision) -> Refusal | None:
        left = request.generation.arrival + self._config.request_timeout - time.monotonic()
        message = Generate(
            incarnation=worker.key.incarnation,
            request=request.engine_request(max(left, 0.0)),
            decode=request.decode.address if request.prefill and request.decode else None,
        )
        if self._send(worker, message):
            self._metrics.placed(decision.prefill is not None)
            return None
        self._forget([request])
        return Refusal(f"worker {worker.key.worker_id} cannot be reached")

    def _place_anew_or_fail(self, request: LiveRequest, kind: ErrorKind, reason: str) -> None:
        if request.generation.is_over:
            return
        if kind in _REPLACEABLE and not request.has_started and request.placements < MAX_PLACEMENTS:
            self._forget([request])
            request.request_id = new_request_id()
            refusal = self._place(request)
            if refusal is None:
                logger.warning("a request is placed anew: %s", reason)
                self._metrics.placed_anew.inc()
                return
            reason = f"{reason}; {refusal.reason}"
        self.fail(request.generation, failed_generation(kind, reason))

    def _timed_out(self, generation: Generation) -> None:
        limit = self._config.request_timeout
        self.fail(generation, ApiError(504, f"the request took longer than {limit:g} s", code="timeout"))

    def _finish_failed(self, generation: Generation, kind: str) -> None:
        self._metrics.failed(kind)
        self._forget(generation.requests)
        self._close(generation)
        generation.notify()

    def _close(self, generation: Generation) -> None:
        if generation.timeout is not None:
            generation.timeout.cancel()

    def _forget(self, requests: Iterable[LiveRequest]) -> None:
        """Take the unfinished ones out of the journal, and out of their workers."""
        unfinished = [request for request in requests if self._journal.remove(request)]
        self._abort(unfinished)
        for request in unfinished:
            self._release(request)

    def _abort(self, requests: Iterable[LiveRequest]) -> None:
        by_worker: dict[Worker, list[str]] = defaultdict(list)
        for request in requests:
            for worker in request.holders:
                by_worker[worker].append(request.request_id)
        for worker, request_ids in by_worker.items():
            self._send(worker, Abort(request_ids=request_ids))

    def _release(self, request: LiveRequest) -> None:
        """Give back its share of the load counts."""
        for worker in request.holders:
            worker.outstanding_requests -= 1
        if not request.has_started and request.holders:
            first = request.holders[0]
            first.outstanding_prefill_tokens -= len(request.choice.prompt.token_ids)
        request.prefill = request.decode = None


def _complaint(request: LiveRequest, output: TokenOutput) -> str | None:
    """What is wrong with a worker's output, where its type can't say it."""
    num_tokens = len(output.token_ids)
    if len(request.output_token_ids) + num_tokens > request.sampling.max_tokens:
        return "sent more tokens than were asked for"
    if output.logprobs is None:
        missing = num_tokens > 0 and request.sampling.logprobs is not None
    else:
        missing = len(output.logprobs) != num_tokens
    return "sent no log-probabilities for some tokens" if missing else None
