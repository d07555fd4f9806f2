"""The draft worker's loop: the engine runs the draft model a few tokens ahead of each target.

Decode workers report their committed tokens, and how many draft tokens they can use. After each step the loop
sends them the tokens drafted after the committed ones. `DraftRequest` lists the stages of a request.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from draft_worker.request import DraftRequest, DraftStage, name_of
from engine.engine import Engine
from kvtransfer.interface import ReceiveEvent, SendEvent
from protocol import worker_to_worker as messages
from protocol.errors import InvalidRequestError
from protocol.outputs import ErrorKind, TokenOutput
from protocol.router_to_worker import Generate
from worker.link import RouterLinks
from worker.loop import WorkerLoop
from worker.parts import WorkerParts
from worker.requests import RequestTable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Answer:
    """The content of the next message to a decode worker."""

    chains: list[messages.DraftedChain] = field(default_factory=list)
    behind: list[messages.MissingTokens] = field(default_factory=list)
    refused: list[messages.DraftKey] = field(default_factory=list)


class _Newest(NamedTuple):
    """The highest message number received from a decode worker, and the time of that message."""

    number: int
    at: float


class DraftLoop(WorkerLoop):
    """The loop that drafts for decode workers; a router sends it no requests."""

    def __init__(self, parts: WorkerParts, engine: Engine, links: RouterLinks) -> None:
        super().__init__(parts, engine, links)
        self.requests: RequestTable[DraftRequest] = RequestTable()
        self._queue: list[DraftRequest] = []
        """Requests in stage QUEUED, oldest first."""
        self._reading: dict[bytes, DraftRequest] = {}
        """The request of each target whose text is being prefilled. One at a time per target, so that a
        target with many new requests delays another target's by at most one text.
        """
        self._newest: dict[bytes, _Newest] = {}
        self._answers: dict[bytes, _Answer] = defaultdict(_Answer)

    # --- messages of the router -------------------------------------------------------------------

    def start_request(self, message: Generate) -> None:
        raise InvalidRequestError("request", f"{self.parts.worker_id} is a draft worker, which only drafts")

    def knows(self, request_id: str) -> bool:
        return False

    def under_way(self) -> list[str]:
        """Return no requests: routers own none here, and targets end theirs."""
        return []

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Ignore the event; a draft worker has no transports."""

    def peer_gone(self, peer: bytes) -> None:
        """End the requests of a lost target. The worker that continues a request opens it again.

        Messages of the lost target that have arrived are read first: read later, they would open requests
        that no target ends.
        """
        self.take_peer_requests()
        for request in [request for request in self.requests if request.target == peer]:
            self.counters.add("draft_requests_orphaned_total")
            self._end(request)

    # --- updates of decode workers ----------------------------------------------------------------

    def handle(self, events: dict[object, int]) -> None:
        super().handle(events)
        self._serve_queue()
        self._choose_rows()
        if not self.engine.has_work():
            self._send_answers()

    def on_peer_request(self, identity: bytes, request: messages.PeerRequest) -> None:
        if not isinstance(request, messages.DraftFor):
            super().on_peer_request(identity, request)
            return
        if request.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            return
        newest = self._newest.get(identity)
        if newest is not None and request.number <= newest.number:
            self.counters.add("duplicate_messages_total")
            return
        self._newest[identity] = _Newest(request.number, time.monotonic())
        self._answers[identity]  # create the answer, since each message gets one
        for key in request.ended:
            ended = self.requests.get(name_of(identity, key.request_id))
            if ended is not None and ended.key.epoch <= key.epoch:
                self._end(ended)
        for update in request.given:
            self._on_update(identity, update)

    def _on_update(self, target: bytes, update: messages.DraftUpdate) -> None:
        known = self.requests.get(name_of(target, update.request_id))
        if known is not None and known.key.epoch > update.epoch:
            self.counters.add("stale_messages_total")
            return
        if known is not None and known.key.epoch < update.epoch:
            self._end(known)
            known = None
        if known is None:
            if update.opening is None or update.start != 0:
                missing = messages.MissingTokens(update.request_id, update.epoch, 0)
                self._answers[target].behind.append(missing)
                return
            known = DraftRequest.open(target, update, update.opening)
            if len(self.requests) >= messages.MAX_DRAFT_REQUESTS:
                self._answers[target].refused.append(known.key)
                self.counters.add("draft_requests_refused_total")
                return
            self.requests.insert(known)
            self.counters.add("draft_requests_opened_total")
            self.counters.add("draft_requests_open")
        known.renew(self._newest[target].at)
        self._take(known, update)

    def _take(self, request: DraftRequest, update: messages.DraftUpdate) -> None:
        num_known = len(request.committed)
        if update.start > num_known:
            missing = messages.MissingTokens(update.request_id, update.epoch, num_known)
            self._answers[request.target].behind.append(missing)
            return
        new = update.token_ids[num_known - update.start :]
        if update.start + len(update.token_ids) < num_known:
            self.counters.add("duplicate_messages_total")
            return
        is_short = update.num_wanted > 0 and num_known + len(new) < request.opening.num_prompt
        is_long = num_known + len(new) >= self.engine.max_model_len
        if is_short or is_long or max(new, default=0) >= self.engine.vocab_size:
            self.counters.add("dropped_messages_total")
            self._refuse(request, "it was given tokens that no request can have")
            return
        request.committed += new
        self._note_wanted(request, new, update.num_wanted)

    def _note_wanted(self, request: DraftRequest, new: list[int], num_wanted: int) -> None:
        """Note the new tokens, and that the target can use `num_wanted` draft tokens after them."""
        was_running = request.wants_row
        request.num_wanted = num_wanted
        match request.stage:
            case DraftStage.ARRIVING if num_wanted:
                request.enter(DraftStage.QUEUED)
                self._queue.append(request)
            case DraftStage.DRAFTING:
                agreed = self.engine.give(request.request_id, new, request.hold_at)
                if new and request.is_read:
                    overtaken = was_running and len(new) > request.num_drafted == agreed
                    self._note_commit(request, agreed, len(new), overtaken)
                request.num_drafted = len(self.engine.sequences[request.request_id].drafted)

    def _note_commit(self, request: DraftRequest, agreed: int, num_new: int, overtaken: bool) -> None:
        if agreed < min(num_new, request.num_drafted):
            self.counters.add("drafted_tokens_wrong_total", request.num_drafted - agreed)
        if overtaken:
            self.counters.add("drafts_overtaken_total")

    # --- QUEUED -> DRAFTING -----------------------------------------------------------------------

    def _serve_queue(self) -> None:
        """Start to read the next request's text of each target that has none being read."""
        for request in list(self._queue):
            if request.target in self._reading:
                continue
            try:
                self.engine.add(request.engine_request(), hold_at=request.hold_at)
            except InvalidRequestError as error:
                self._refuse(request, str(error))
                continue
            self._queue.remove(request)
            request.enter(DraftStage.DRAFTING)
            self._reading[request.target] = request

    # --- DRAFTING ---------------------------------------------------------------------------------

    def _choose_rows(self) -> None:
        """Let the engine run the requests that get a row in the batch, and hold the others."""
        drafting = [request for request in self.requests if request.stage is DraftStage.DRAFTING]
        wanting = [request for request in drafting if request.wants_row]
        if len(wanting) > self.config.max_num_seqs:
            wanting = share_rows(wanting, self.config.max_num_seqs)
        chosen = {request.request_id for request in wanting}
        for request in drafting:
            if request.request_id in chosen:
                self.engine.resume(request.request_id)
            else:
                self.engine.scheduler.hold(self.engine.sequences[request.request_id])

    def deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            request = self.requests.get(output.request_id)
            if request is None:
                continue
            if output.finish_reason is not None:
                self._refuse(request, output.error or "the engine ended it")
                continue
            self._note_read(request)
            drafted = self.engine.sequences[request.request_id].drafted
            self.counters.add("drafted_tokens_total", len(drafted) - request.num_drafted)
            request.num_drafted = len(drafted)
            chain = messages.DraftedChain(
                request.key.request_id, request.key.epoch, len(request.committed), drafted
            )
            self._answers[request.target].chains.append(chain)

    def _note_read(self, request: DraftRequest) -> None:
        request.is_read = True
        if self._reading.get(request.target) is request:
            del self._reading[request.target]

    def after_step(self, outputs: list[TokenOutput]) -> None:
        if not self._advancing:
            self._refuse_those_without_room()
        self._serve_queue()
        self._choose_rows()
        self._send_answers()

    def _refuse_those_without_room(self) -> None:
        """Refuse requests without blocks: held requests keep their blocks, so these would wait for long."""
        for request in self.requests:
            is_read = request.stage is not DraftStage.DRAFTING or request.is_read
            if not is_read and self.engine.sequences[request.request_id].has_grammar:
                self._refuse(request, "there is no room for its KV")

    def _send_answers(self) -> None:
        for target, answer in self._answers.items():
            message = messages.Drafts(
                incarnation=self.parts.incarnation,
                number=self._newest[target].number,
                chains=answer.chains,
                behind=answer.behind,
                refused=answer.refused,
            )
            self.inbox.reply(target, message)
        self._answers.clear()

    # --- -> ENDED ---------------------------------------------------------------------------------

    def computing(self) -> list[str]:
        return [request.request_id for request in self.requests if request.stage is DraftStage.DRAFTING]

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._refuse(request, reason)

    def _refuse(self, request: DraftRequest, reason: str) -> None:
        """End the request, and tell its target that no more drafts will come."""
        self.counters.add("draft_requests_refused_total")
        about = {"request_id": request.request_id}
        log.info("no more drafts for %s: %s", request.request_id, reason, extra=about)
        self._answers[request.target].refused.append(request.key)
        self._end(request)

    def _end(self, request: DraftRequest) -> None:
        if request.stage is DraftStage.QUEUED:
            self._queue.remove(request)
        elif request.stage is DraftStage.DRAFTING:
            self.engine.abort(request.request_id)
            if self._reading.get(request.target) is request:
                del self._reading[request.target]
        request.enter(DraftStage.ENDED)
        self.requests.release_id(request)
        self.counters.add("draft_requests_open", -1)

    def expire(self, now: float) -> None:
        for request in self.requests:
            if request.is_overdue(now):
                self.counters.add("draft_requests_expired_total")
                self._end(request)
        for target, newest in list(self._newest.items()):
            if now - newest.at > messages.DRAFT_LEASE_S and target not in self._answers:
                del self._newest[target]
        self._choose_rows()
        if not self.engine.has_work():
            self._send_answers()


def share_rows(requests: Iterable[DraftRequest], num_rows: int) -> list[DraftRequest]:
    """Return the requests that get the next step's rows. Targets take turns, one request each. A target's
    requests with the fewest draft tokens come first, because these are the likeliest to be accepted.

    This is deficit round robin with a quantum of one row: every row costs the same, so no deficit remains.
    """
    by_target: dict[bytes, list[DraftRequest]] = defaultdict(list)
    for request in requests:
        by_target[request.target].append(request)
    for of_target in by_target.values():
        of_target.sort(key=lambda request: request.num_drafted)
    rounds = zip_longest(*by_target.values())
    return [request for each in rounds for request in each if request is not None][:num_rows]
