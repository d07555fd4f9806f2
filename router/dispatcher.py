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
from protocol.messages import (
    Abort,
    ErrorKind,
    Generate,
    HandoverFailed,
    Redirect,
    RequestTiming,
    Role,
    StepOutput,
    TokenOutput,
)
from router.errors import ApiError, failed_generation
from router.journal import Generation, Journal, LiveRequest
from router.metrics import Metrics
from router.placement.interface import Decision, PlacementPolicy, Refusal, RequestFacts
from router.prefixes import PrefixDirectory
from router.registry import Registry, Worker
from router.request_log import describe

logger = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
MAX_REDIRECTS = 3
"""Decode workers that a request is offered to in vain before its prefill worker decodes it."""

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
        self._missing_role: Role | None = None
        self._prefixes = PrefixDirectory()

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
        """Place its requests anew. Prompts that were to be handed over to it go to another decode worker."""
        self._prefixes.forget(worker.key)
        message = f"worker {worker.key.worker_id} was lost: {reason}"
        for request in self._journal:
            if worker is request.decode and request.prefill is not None:
                self._redirect(request, "worker_lost", message)
            elif worker in request.holders:
                self._place_anew_or_fail(request, "worker_lost", message)

    def handover_failed(self, message: HandoverFailed) -> None:
        """A prefill worker has a prompt on its hands that its decode worker did not take."""
        worker = self._registry.current(message.worker_id, message.incarnation)
        request = self._journal.get(message.request_id)
        if worker is None:
            self._metrics.dropped("stale_incarnation")
        elif request is None:
            self._metrics.dropped("unknown_request")
            self._send(worker, Abort(request_ids=[message.request_id]))
        elif request.decode is None or request.decode.key.incarnation != message.decode_incarnation:
            self._metrics.dropped("redirected_before")
        elif worker is request.prefill:
            may_ask_again = message.error_kind == "transfer" and not message.manifest_sent
            self._redirect(request, message.error_kind, message.reason, may_ask_again)
        elif worker is request.prefilled_by:
            # Its tokens came before this news: it had begun, and has been told to give the request up.
            self._send(worker, Abort(request_ids=[message.request_id]))
            self._place_anew_or_fail(request, "transfer", message.reason)
        else:
            self._metrics.dropped("not_the_holder")

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
                num_tokens += self._take_or_fail(request, worker, output, now)
        if num_tokens:
            self._metrics.generation_tokens.inc(num_tokens)

    def _take_or_fail(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> int:
        """Returns how many tokens the answer gained."""
        if request.is_early(worker):
            request.early.append(output)
            return 0
        num_before = request.choice.num_tokens
        try:
            self._take(request, worker, output, now)
            while request.early and request.decode is not None and self._journal.get(request.request_id):
                self._take(request, request.decode, request.early.pop(0), now)
        except Exception:  # one request's output must not take the others down
            logger.exception("request %s failed in the router", request.request_id)
            self.fail(request.generation, failed_generation("internal", "the router failed on this request"))
        return request.choice.num_tokens - num_before

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
            request.note(output.timing)
            self._metrics.observe_timing(output.timing)
        if choice.finish_reason is not None:
            if output.finish_reason is None:
                self._abort([request])
            self._note_prefix(request)
            self._release(request)
            self._journal.remove(request)
            self._metrics.request_finished(request, now)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", describe(request, now))
            generation = request.generation
            generation.num_unfinished -= 1
            if generation.is_over:
                self._close(generation)
        request.generation.notify()

    def _account_tokens(self, request: LiveRequest, worker: Worker, output: TokenOutput, now: float) -> None:
        if not request.has_answered:
            (request.prefill or worker).outstanding_prefill_tokens -= request.num_prefill_tokens
        if not request.has_started:
            request.first_token_time = now
            self._metrics.first_token(request, now)
        else:
            self._metrics.inter_token_latency.observe(now - request.last_token_time)
        if request.prefill is not None and worker is request.decode:
            request.prefill.outstanding_requests -= 1
            request.prefill = None
        request.last_token_time = now
        request.output_token_ids.extend(output.token_ids)

    # --- placement --------------------------------------------------------------------------------

    def _place(self, request: LiveRequest) -> Refusal | None:
        """Send it to the workers that the policy names, and to others when those can't be reached."""
        request.num_emitted_before = len(request.output_token_ids)
        request.timing = RequestTiming()
        while True:
            decision = self._decide(request)
            if isinstance(decision, Refusal):
                return decision
            first = self._assign(request, decision)
            if self._dispatch(request, first, decision.prefix):
                logger.debug("request %s: %s", request.request_id, decision)
                self._metrics.placed(decision.prefill is not None)
                self._note_fallback(decision)
                return None
            request.failed.add(first.key.incarnation)
            self._journal.remove(request)
            self._release(request)
            if request.placements >= MAX_PLACEMENTS:
                return Refusal(f"worker {first.key.worker_id} cannot be reached")

    def _decide(self, request: LiveRequest) -> Decision | Refusal:
        live = self._registry.live()
        workers = [worker for worker in live if worker.key.incarnation not in request.failed] or live
        return self._policy(self._facts(request), [worker.snapshot() for worker in workers])

    def _facts(self, request: LiveRequest) -> RequestFacts:
        holder = request.prefilled_by
        return RequestFacts(
            num_prompt_tokens=request.num_prefill_tokens,
            max_tokens=request.sampling.max_tokens,
            priority=request.generation.priority,
            disaggregate=self._config.disaggregation,
            prefix_at=holder.key.worker_id if holder is not None and holder.live else None,
            cached_tokens=self._cached_tokens(request),
        )

    def _cached_tokens(self, request: LiveRequest) -> dict[str, int]:
        if not self._shares_prefix(request):
            return {}
        found = self._prefixes.find(request.token_ids, request.generation.cache_salt)
        return {key.worker_id: tokens for key, tokens in found.items() if self._registry.current(*key)}

    def _note_prefix(self, request: LiveRequest) -> None:
        """What its workers hold from now on; nobody computes the KV of an answer's last token."""
        if not self._shares_prefix(request):
            return
        salt = request.generation.cache_salt
        if request.decode is not None:
            self._prefixes.add(request.decode.key, request.token_ids[:-1], salt)
        if request.prefilled_by is not None:
            self._prefixes.add(request.prefilled_by.key, request.choice.prompt.token_ids, salt)

    def _shares_prefix(self, request: LiveRequest) -> bool:
        return self._config.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _assign(self, request: LiveRequest, decision: Decision) -> Worker:
        """Write the decision down; returns the worker that begins."""
        prefill = self._registry.named(decision.prefill) if decision.prefill is not None else None
        request.prefill, request.decode = prefill, self._registry.named(decision.decode)
        request.placements += 1
        request.early.clear()
        first = request.holders[0]
        if first.role == "prefill":
            request.prefilled_by = first
        for worker in request.holders:
            worker.outstanding_requests += 1
        first.outstanding_prefill_tokens += request.num_prefill_tokens
        self._journal.add(request)
        return first

    def _dispatch(self, request: LiveRequest, worker: Worker, prefix: str | None) -> bool:
        left = request.generation.arrival + self._config.request_timeout - time.monotonic()
        message = Generate(
            incarnation=worker.key.incarnation,
            request=request.engine_request(max(left, 0.0)),
            decode=request.decode.address if request.prefill and request.decode else None,
            prefix=self._registry.named(prefix).address if prefix is not None else None,
        )
        return self._send(worker, message)

    def _note_fallback(self, decision: Decision) -> None:
        """Count, and tell at each change, what is colocated only because a role's workers are gone."""
        missing = decision.missing_role if self._config.disaggregation else None
        is_there = any(worker.role == missing for worker in self._registry.live())
        if is_there or missing not in self._registry.known_roles:
            missing = None
        if missing is not None:
            self._metrics.role_fallback(missing)
        if missing != self._missing_role:
            if missing is not None:
                logger.warning("no %s worker is left: the others serve whole requests", missing)
            else:
                logger.warning("there is a %s worker again", self._missing_role)
            self._missing_role = missing

    # --- failover ---------------------------------------------------------------------------------

    def _place_anew_or_fail(self, request: LiveRequest, kind: ErrorKind, reason: str) -> None:
        """The journal has all that another worker needs: the prompt, and the tokens emitted so far."""
        if request.generation.is_over:
            return
        if kind in _REPLACEABLE:
            model = self._registry.model
            end = request.end(model.eos_token_ids if model is not None else ())
            if end is not None:
                self._abort([request])
                self._take(request, request.holders[0], end, time.monotonic())
                return
            if request.placements < MAX_PLACEMENTS:
                self._forget([request])
                request.request_id = new_request_id()
                refusal = self._place(request)
                if refusal is None:
                    emitted = request.num_emitted_before
                    name = request.request_id
                    logger.warning("placed anew as %s after %d tokens: %s", name, emitted, reason)
                    self._metrics.placed_anew(kind)
                    return
                reason = f"{reason}; {refusal.reason}"
        self.fail(request.generation, failed_generation(kind, reason))

    def _redirect(
        self, request: LiveRequest, kind: ErrorKind, reason: str, may_ask_again: bool = False
    ) -> None:
        """Name another decode worker to the prefill worker, which keeps what it has computed.

        Where there is none, the prefill worker decodes the request itself.
        """
        prefill, failed = request.prefill, request.decode
        assert prefill is not None and failed is not None
        may_ask_again = may_ask_again and failed.key.incarnation not in request.failed
        request.failed.add(failed.key.incarnation)
        target = self._next_decode(request, prefill, failed if may_ask_again else None)
        message = Redirect(
            incarnation=prefill.key.incarnation,
            request_id=request.request_id,
            decode=None if target is prefill else target.address,
        )
        if not self._send(prefill, message):
            reason = f"{reason}; worker {prefill.key.worker_id} cannot be reached"
            self._place_anew_or_fail(request, "worker_lost", reason)
            return
        logger.warning("request %s: %s decodes it: %s", request.request_id, target.key.worker_id, reason)
        request.redirects += 1
        request.early.clear()
        failed.outstanding_requests -= 1
        if target is not failed:
            self._send(failed, Abort(request_ids=[request.request_id]))
        if target is prefill:
            request.prefill, request.decode = None, prefill
            self._metrics.taken_over(kind)
        else:
            request.decode = target
            target.outstanding_requests += 1
            self._metrics.redirected(kind)

    def _next_decode(self, request: LiveRequest, prefill: Worker, again: Worker | None) -> Worker:
        """Who is to decode it: another decode worker, the only one once more (`again`), or `prefill`."""
        if request.redirects >= MAX_REDIRECTS:
            return prefill
        decodes = [worker for worker in self._registry.live() if worker.role == "decode"]
        others = [worker for worker in decodes if worker.key.incarnation not in request.failed]
        if again is not None and decodes == [again]:
            others = decodes
        workers = [prefill, *others]
        decision = self._policy(self._facts(request), [worker.snapshot() for worker in workers])
        if isinstance(decision, Refusal):
            return prefill
        return self._registry.named(decision.decode)

    # --- the end ----------------------------------------------------------------------------------

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
        if not request.has_answered and request.holders:
            request.holders[0].outstanding_prefill_tokens -= request.num_prefill_tokens
        request.prefill = request.decode = None


def _complaint(request: LiveRequest, output: TokenOutput) -> str | None:
    """What is wrong with a worker's output, where its type can't say it."""
    num_tokens = len(output.token_ids)
    if len(request.output_token_ids) + num_tokens > request.sampling.max_tokens:
        return "sent more tokens than were asked for"
    if output.accepted_tokens > min(num_tokens, output.drafted_tokens):
        return "counted more tokens as accepted than it drafted or sent"
    if output.logprobs is None:
        missing = num_tokens > 0 and request.sampling.logprobs is not None
    else:
        missing = len(output.logprobs) != num_tokens
    return "sent no log-probabilities for some tokens" if missing else None
