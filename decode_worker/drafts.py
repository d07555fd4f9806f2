"""The decode worker's client of the draft workers.

After each step, one message tells a draft worker which tokens were committed for all of its requests. Drafts
arrive asynchronously. If a draft worker is silent or refuses a request, its requests decode without drafts,
and the client asks it again later. The client repeats the ids of ended requests until the draft worker
confirms them, so that a lost message leaves nothing on the draft worker.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol import worker_to_worker as messages
from protocol.ids import PeerAddress
from speculation.remote import RemoteDrafter, RemoteRequest
from worker.link import PeerLinks
from worker.parts import Counters

log = logging.getLogger(__name__)

ASK_AGAIN_S = 1.0
"""[s] Time without an answer, or without a confirmed end, after which the client sends it again."""
REFUSAL_STANDS_S = 5.0
"""[s] Time for which a refused request is not offered again to the same draft worker."""
ANSWER_PACE = 0.05
"""[share] Weight of one answer in the running mean of a draft worker's answer times."""
ANSWERS_STAND_S = 60.0
"""[s] Time after which the answer time of an unused draft worker is forgotten: its cause may have passed."""
MAX_TOKENS_AT_ONCE = 2**20
"""Most tokens in one message."""


@dataclass(eq=False)
class DraftOrder:
    """The state of a request at its draft worker in one epoch: the draft worker knows its first `num_sent`
    tokens and was asked to draft `num_wanted` more.
    """

    remote: RemoteRequest
    epoch: int
    num_sent: int = 0
    num_wanted: int = 0
    refused_until: float = 0.0

    @property
    def key(self) -> messages.DraftKey:
        return messages.DraftKey(self.remote.request_id, self.epoch)

    def update(self, now: float) -> messages.DraftUpdate | None:
        """Return the next update for the draft worker, or None. A returned update counts as sent."""
        sequence, wanted = self.remote.sequence, self.remote.num_wanted
        if now < self.refused_until or not (wanted or self.num_wanted):
            return None  # the next update, once drafts are wanted again, has the missed tokens
        start = self.num_sent
        end = min(len(sequence.token_ids), start + messages.MAX_UPDATE_TOKENS)
        if end < len(sequence.token_ids):
            wanted = 0  # until the draft worker has all tokens
        if end == start and wanted == self.num_wanted:
            return None
        self.num_sent, self.num_wanted = end, wanted
        opening = None
        if start == 0:
            request = sequence.request
            opening = messages.DraftOpening(
                sampling=request.sampling,
                num_prompt=len(request.prompt_token_ids),
                cache_salt=request.cache_salt,
            )
        return messages.DraftUpdate(
            request_id=self.remote.request_id,
            epoch=self.epoch,
            start=start,
            token_ids=sequence.token_ids[start:end],
            num_wanted=wanted,
            opening=opening,
        )


@dataclass(eq=False)
class _DraftConnection:
    """The state of the connection to a draft worker.

    `awaited_since` is when the oldest unanswered message was sent. `ended` maps each ended request that the
    draft worker may not know of to the number of the first message that reported its end, or to 0.
    """

    address: PeerAddress
    last_message_at: float
    awaited_since: float | None = None
    is_lost: bool = False
    ask_at: float = 0.0
    updates: list[messages.DraftUpdate] = field(default_factory=list)
    ended: dict[messages.DraftKey, int] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def has_updates(self) -> bool:
        return bool(self.updates) or 0 in self.ended.values()

    def message(self, number: int) -> messages.DraftFor:
        """Return a message with all pending updates and the unconfirmed ends."""
        ended = list(self.ended)[: messages.MAX_DRAFT_REQUESTS]
        self.ended.update((key, self.ended[key] or number) for key in ended)
        updates, self.updates, self.num_tokens = self.updates, [], 0
        return messages.DraftFor(
            incarnation=self.address.incarnation, number=number, given=updates, ended=ended
        )

    def confirm(self, number: int) -> None:
        """Forget the ended requests that were reported up to message `number`."""
        self.ended = {key: first for key, first in self.ended.items() if first == 0 or first > number}


class DraftClient:
    """The client that tells draft workers of `remote`'s requests and gets drafts. For the loop's thread."""

    def __init__(
        self, remote: RemoteDrafter, peers: PeerLinks, counters: Counters, vocab_size: int, silence_s: float
    ) -> None:
        """Treat a draft worker as lost if it leaves a message unanswered for `silence_s`."""
        self._remote = remote
        self._peers = peers
        self._counters = counters
        self._vocab_size = vocab_size
        self._silence_s = silence_s
        self._epochs = itertools.count(1)
        self._numbers = itertools.count(1)
        self._orders: dict[str, DraftOrder] = {}
        self._connections: dict[str, _DraftConnection] = {}
        self._answered_at: dict[str, float] = {}

    def incarnations(self) -> Iterable[str]:
        """Return the incarnations of the draft workers from which an answer or drafts may come."""
        return self._connections.keys()

    def send(self) -> None:
        """Send each draft worker its updates. The loop calls this after each step."""
        now = time.monotonic()
        for ended in self._remote.ended:
            self._close(ended)
        self._remote.ended.clear()
        for remote in self._remote.requests.values():
            self._collect(remote, now)
        for connection in self._connections.values():
            if connection.has_updates and not connection.is_lost:
                self._send_to(connection, now)

    def _close(self, remote: RemoteRequest) -> None:
        order = self._orders.get(remote.request_id)
        if order is None or order.remote is not remote:
            return
        del self._orders[remote.request_id]
        self._connections[remote.at.incarnation].ended[order.key] = 0

    def _collect(self, remote: RemoteRequest, now: float) -> None:
        connection = self._connections.get(remote.at.incarnation)
        if connection is None:
            connection = _DraftConnection(remote.at, last_message_at=now)
            self._connections[remote.at.incarnation] = connection
        if connection.is_lost or connection.num_tokens > MAX_TOKENS_AT_ONCE:
            return
        order = self._orders.get(remote.request_id)
        if order is None:
            if not remote.granted:
                return
            order = self._orders[remote.request_id] = DraftOrder(remote, next(self._epochs))
        if (update := order.update(now)) is not None:
            connection.updates.append(update)
            connection.num_tokens += len(update.token_ids)

    def _send_to(self, connection: _DraftConnection, now: float) -> None:
        connection.ask_at = now + ASK_AGAIN_S
        is_taken = self._peers.offer(connection.address, connection.message(next(self._numbers)))
        if connection.is_lost:
            return
        if not is_taken:
            self._lose(connection, now, "it takes no more messages")
        elif connection.awaited_since is None:
            connection.awaited_since = now

    def on_drafts(self, peer: PeerAddress, message: messages.Drafts) -> None:
        connection = self._connections.get(peer.incarnation)
        if connection is None or message.incarnation != peer.incarnation:
            self._counters.add("stale_messages_total")
            return
        self._note_answer(connection)
        connection.last_message_at = time.monotonic()
        connection.confirm(message.number)
        if connection.is_lost:
            connection.is_lost = False
            log.info("draft worker %s answers again", peer.worker_id)
        for chain in message.chains:
            self._on_chain(peer, chain)
        for missing in message.behind:
            self._on_missing(peer, missing)
        for refused in message.refused:
            self._on_refused(peer, refused)

    def _note_answer(self, connection: _DraftConnection) -> None:
        since, connection.awaited_since = connection.awaited_since, None
        if since is None:
            return
        now, worker_id = time.monotonic(), connection.address.worker_id
        answers, seconds = self._remote.answers, now - since
        known = answers.get(worker_id, seconds)
        answers[worker_id] = known + ANSWER_PACE * (seconds - known)
        self._answered_at[worker_id] = now

    def _order(self, peer: PeerAddress, request_id: str, epoch: int) -> DraftOrder | None:
        order = self._orders.get(request_id)
        if order is None or order.epoch != epoch or order.remote.at.incarnation != peer.incarnation:
            return None
        return order

    def _on_chain(self, peer: PeerAddress, chain: messages.DraftedChain) -> None:
        self._counters.add("remote_drafts_total")
        order = self._order(peer, chain.request_id, chain.epoch)
        if max(chain.token_ids, default=0) >= self._vocab_size:
            self._counters.add("dropped_messages_total")
            return
        use = order.remote.take(chain.start, chain.token_ids) if order is not None else "stale"
        if use != "usable":
            self._counters.add(f"remote_drafts_{use}_total")

    def _on_missing(self, peer: PeerAddress, missing: messages.MissingTokens) -> None:
        """Send the request's tokens again from the first one that the draft worker lacks."""
        order = self._order(peer, missing.request_id, missing.epoch)
        if order is not None:
            order.num_sent = min(order.num_sent, missing.num_tokens)

    def _on_refused(self, peer: PeerAddress, key: messages.DraftKey) -> None:
        order = self._order(peer, key.request_id, key.epoch)
        if order is not None:
            self._counters.add("remote_drafts_refused_total")
            about = {"request_id": key.request_id}
            log.info("draft worker %s refuses request %s", peer.worker_id, key.request_id, extra=about)
            until = time.monotonic() + REFUSAL_STANDS_S
            self._orders[key.request_id] = DraftOrder(order.remote, next(self._epochs), refused_until=until)

    def expire(self, now: float) -> None:
        """Give up draft workers that do not answer, and retry those that were given up earlier."""
        for worker_id, answered_at in list(self._answered_at.items()):
            if now - answered_at > ANSWERS_STAND_S:
                del self._answered_at[worker_id], self._remote.answers[worker_id]
        used = {remote.at.incarnation for remote in self._remote.requests.values()}
        for incarnation, connection in list(self._connections.items()):
            is_used, since = incarnation in used, connection.awaited_since
            if not is_used and (
                not connection.ended or now - connection.last_message_at > messages.DRAFT_LEASE_S
            ):
                del self._connections[incarnation]
            elif is_used and since is not None and now - since > self._silence_s:
                self._lose(connection, now, f"it sent nothing for {now - since:.1f} s")
            elif (connection.is_lost or connection.ended) and now >= connection.ask_at:
                self._send_to(connection, now)

    def _lose(self, connection: _DraftConnection, now: float, why: str) -> None:
        self._counters.add("draft_workers_lost_total")
        log.warning("no drafts from %s: %s", connection.address.worker_id, why)
        connection.is_lost, connection.awaited_since, connection.ask_at = True, None, now + ASK_AGAIN_S
        for request_id, order in list(self._orders.items()):
            if order.remote.at.incarnation == connection.address.incarnation:
                del self._orders[request_id]
                connection.ended[order.key] = 0
