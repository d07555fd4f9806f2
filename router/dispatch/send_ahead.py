"""The sending of requests to their workers, only as many as keep the workers busy.

A worker serves requests in the order of arrival, so none can overtake a request that was sent. The others
wait here, where API keys take turns, or clients if there are no keys.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from router.dispatch import Core
from router.placement.interface import WorkerSnapshot
from router.placement.predict import chunk_tokens, compute_s
from router.requests.journal import LiveRequest
from router.workers.assignment import Assignment, Stage
from router.workers.registry import Worker

AHEAD_S = 0.1
"""[seconds] Work to send in addition to the running requests: several steps, and many message latencies."""
MIN_AHEAD = 2
"""Requests to send whatever their length: the running one and the next."""
AHEAD_STEPS = 2
"""Steps to fill with prompt tokens: the running one and the next."""
LEAST_COST = 1e-3
"""[tokens] Less than any request costs, and more than rounding leaves of a difference of costs."""

Transmit = Callable[[LiveRequest, Assignment], bool]


@dataclass(eq=False)
class _WorkerQueue:
    """One worker's waiting requests, uncached `tokens`, and cost sent there by `Generation.turn`."""

    tokens: int = 0
    waiting: FairQueue[LiveRequest] = field(init=False)
    _sent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = FairQueue(lambda turn: self._sent.get(turn, 0.0))

    def charge(self, turn: str, cost: float) -> None:
        """Add to the cost sent. A negative `cost` takes it back; who has nothing left is forgotten."""
        cost += self._sent.pop(turn, 0.0)
        if abs(cost) > LEAST_COST:
            self._sent[turn] = cost


class SendAhead:
    """Queues of requests that wait for room at their workers. Runs on the event loop only.

    `transmit` sends an assigned request to its first worker and returns whether that worker can be reached.
    `mean_output` returns the mean number of tokens of answers.
    """

    def __init__(self, core: Core, transmit: Transmit, mean_output: Callable[[], float]) -> None:
        self._metrics, self._max_num_seqs = core.metrics, core.config.max_num_seqs
        self._transmit = transmit
        self._mean_output = mean_output
        self._queues: defaultdict[Worker, _WorkerQueue] = defaultdict(_WorkerQueue)
        self._rows: Counter[Worker] = Counter()
        """Number of waiting requests that each worker is to decode."""
        self._freed: dict[Worker, None] = {}
        """Workers that may have room again."""
        self._blocked: defaultdict[Worker, set[Worker]] = defaultdict(set)
        """Workers whose queues wait for a row, by the decode worker that has no free row."""

    def offer(self, request: LiveRequest, at: Assignment) -> bool:
        """Send the request now, or queue it. Return False if its worker cannot be reached.

        A request that has generated tokens never waits, since its client has seen it run; nor does a racing
        copy.
        """
        queue = self._queues[at.first]
        if request.output_token_ids or request.owner is not None:
            return self._send(request, at, queue)
        others_wait = bool(queue.waiting)
        self._enter(request, at, queue)
        if not others_wait and self._has_room(at, queue):
            self._leave(request, at, queue)
            return self._send(request, at, queue)
        request.times.park()
        self._metrics.count("num_requests_held", request.generation.key)
        return True

    def forget(self, request: LiveRequest, at: Assignment) -> None:
        """Remove a request that has ended or is placed again, which makes room at its workers."""
        queue = self._queues.get(at.first)
        if queue is not None and at.stage is not Stage.HELD:
            queue.charge(request.generation.turn, -request.cost)
        elif queue is not None and request in queue.waiting:
            self._stop_waiting(request, at, queue)
        self.free(at)

    def free(self, at: Assignment) -> None:
        """Note that the assignment's workers may have room for more requests."""
        self._freed.update(dict.fromkeys(at.holders))

    def check_all(self) -> None:
        """Check every queue again, since predictions change and workers leave."""
        self._blocked.clear()
        for worker, queue in list(self._queues.items()):
            if queue.waiting:
                self._freed[worker] = None
            elif not worker.live:
                del self._queues[worker]

    def send_waiting(self) -> Iterator[LiveRequest]:
        """Send the requests that have room now. Yield the requests whose worker cannot be reached."""
        while self._freed:
            freed, _ = self._freed.popitem()
            for worker in {freed, *self._blocked.pop(freed, ())}:
                yield from self._send_queue(worker)

    def num_held(self, worker: Worker) -> int:
        """Return the number of requests that wait here for room at the worker."""
        queue = self._queues.get(worker)
        return len(queue.waiting) if queue is not None else 0

    def overtaken_share(self, request: LiveRequest, first: Worker) -> float:
        """Return the share of the prompts outstanding at `first` that the request overtakes."""
        queue = self._queues.get(first)
        if queue is None or first.outstanding_prompts <= 0:
            return 0.0
        generation = request.generation
        count = queue.waiting.overtaken(generation.turn, generation.priority, request.cost)
        return min(count / first.outstanding_prompts, 1.0)

    def _send_queue(self, worker: Worker) -> Iterator[LiveRequest]:
        queue = self._queues.get(worker)
        while queue is not None and queue.waiting:
            request = queue.waiting.head()
            at = request.current
            assert at is not None
            if not self._has_room(at, queue):
                return
            self._stop_waiting(request, at, queue, in_turn=True)
            if not self._send(request, at, queue):
                yield request

    def _enter(self, request: LiveRequest, at: Assignment, queue: _WorkerQueue) -> None:
        generation = request.generation
        queue.waiting.add(request, generation.turn, generation.priority, request.cost)
        queue.tokens += at.num_uncached
        self._rows[at.decode] += 1

    def _leave(self, request: LiveRequest, at: Assignment, queue: _WorkerQueue, in_turn: bool = True) -> None:
        (queue.waiting.pop if in_turn else queue.waiting.remove)(request)
        queue.tokens -= at.num_uncached
        self._rows[at.decode] -= 1
        if not self._rows[at.decode]:
            del self._rows[at.decode]

    def _stop_waiting(
        self, request: LiveRequest, at: Assignment, queue: _WorkerQueue, in_turn: bool = False
    ) -> None:
        self._leave(request, at, queue, in_turn)
        request.times.unpark()
        key, waited_s = request.generation.key, time.monotonic() - request.times.parked_at
        self._metrics.count("num_requests_held", key, by=-1)
        self._metrics.count("request_held_seconds_total", key, by=waited_s)

    def _send(self, request: LiveRequest, at: Assignment, queue: _WorkerQueue) -> bool:
        if not self._transmit(request, at):
            return False
        queue.charge(request.generation.turn, request.cost)
        if request.owner is None:
            self._metrics.count("api_key_tokens_total", request.generation.key, by=request.cost)
        return True

    def _has_room(self, at: Assignment, queue: _WorkerQueue) -> bool:
        """Return whether the assignment's workers would soon be idle without the request."""
        first, decode = at.first, at.decode
        prompts = first.outstanding_prompts - len(queue.waiting)
        tokens = first.outstanding_prefill_tokens - queue.tokens
        if not self._has_prompt_room(first, prompts, tokens):
            return False
        prefill_s = 0.0 if first is decode else compute_s(first.load, tokens + at.num_uncached, 0)
        if not self._has_row_room(decode, prefill_s):
            self._blocked[decode].add(first)
            return False
        return True

    def _has_prompt_room(self, first: Worker, prompts: int, tokens: int) -> bool:
        if prompts < MIN_AHEAD:
            return True
        load = self._running(first)
        if tokens < AHEAD_STEPS * chunk_tokens(load, 0):
            return True
        return prompts * compute_s(load, tokens / prompts, 0) < AHEAD_S

    def _has_row_room(self, decode: Worker, prefill_s: float) -> bool:
        """Return whether the decode worker may get another request.

        Rows that end during a prefill elsewhere and within `AHEAD_S` after it make room for as many new ones.
        At most one batch is sent in addition to the running one, since answers may become longer than before.
        """
        load = self._running(decode)
        steps = max(self._mean_output() / max(load.costs.tokens_per_row, 1.0), 1.0)
        request_s = steps * load.costs_now.decode_s(load.rows, load.context_tokens)
        ending = (AHEAD_S + prefill_s) * load.rows / request_s if request_s > 0 else self._max_num_seqs
        return self._sent_rows(decode) < self._max_num_seqs + max(MIN_AHEAD, min(ending, self._max_num_seqs))

    def _running(self, worker: Worker) -> WorkerSnapshot:
        """Return the worker's load without requests that wait, in its queue here or for a row there."""
        load = worker.load
        rows = min(self._sent_rows(worker), self._max_num_seqs)
        context = load.context_tokens * rows / load.rows if load.rows > 0 else 0.0
        return replace(load, rows=rows, context_tokens=context)

    def _sent_rows(self, worker: Worker) -> int:
        return worker.outstanding_rows - self._rows[worker]


QUANTUM = 16.0
"""[tokens] Share of a key in each turn; less than most requests cost, so that keys alternate finely."""

Item = TypeVar("Item", bound=Hashable)


@dataclass(eq=False)
class _Flow(Generic[Item]):
    """The waiting items of one key and one priority with their costs, the oldest first."""

    costs: dict[Item, float] = field(default_factory=dict)
    total: float = 0.0
    deficit: float = 0.0

    @property
    def oldest(self) -> Item:
        return next(iter(self.costs))

    @property
    def missing(self) -> float:
        """Tokens that the key must still save to send its oldest item."""
        return self.costs[self.oldest] - self.deficit


class FairQueue(Generic[Item]):
    """Items that wait for one worker, with deficit round robin among keys.

    `sent(key)` returns the cost of the key's items that the worker has. When a key begins to wait, it starts
    with a debt: this cost, less that of the waiting key with the least. So a key that filled the worker while
    no other key waited must let others catch up.
    """

    def __init__(self, sent: Callable[[str], float]) -> None:
        self._sent = sent
        self._turns: dict[int, dict[str, _Flow[Item]]] = {}
        """Flows by priority, then by key; the first key has the turn."""
        self._places: dict[Item, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def add(self, item: Item, key: str, priority: int, cost: float) -> None:
        """Add an item. Its `cost` is fixed. A lower `priority` comes first."""
        flows = self._turns.setdefault(priority, {})
        if key not in flows:
            self._start(flows, key)
        flows[key].costs[item] = cost
        flows[key].total += cost
        self._places[item] = priority, key

    def remove(self, item: Item) -> None:
        """Remove an item without charging its key."""
        priority, key = self._places.pop(item)
        flows = self._turns[priority]
        flows[key].total -= flows[key].costs.pop(item)
        if not flows[key].costs:
            del flows[key]
        if not flows:
            del self._turns[priority]

    def head(self) -> Item:
        """Return the item whose turn it is. It keeps its turn until `pop` or `remove`."""
        flows = self._turns[min(self._turns)]
        turns = math.ceil(min(flow.missing for flow in flows.values()) / QUANTUM)
        for flow in flows.values():  # skip the rounds in which no key has saved enough
            flow.deficit += max(turns - 1, 0) * QUANTUM
        while True:
            key, flow = next(iter(flows.items()))
            if flow.missing <= 0:
                return flow.oldest
            flow.deficit += QUANTUM
            flows[key] = flows.pop(key)

    def pop(self, item: Item) -> None:
        """Remove the item that is sent, and charge its cost to its key."""
        priority, key = self._places[item]
        flow = self._turns[priority][key]
        flow.deficit -= flow.costs[item]
        self.remove(item)

    def overtaken(self, key: str, priority: int, cost: float) -> float:
        """Return the expected number of waiting items that would be sent after a new one."""
        count = 0.0
        for level, flows in self._turns.items():
            before = cost + (flows[key].total if key in flows else 0.0)
            for flow in flows.values():
                if level > priority:
                    count += len(flow.costs)
                elif level == priority and flow.total > before:
                    count += len(flow.costs) * (1 - before / flow.total)
        return count

    def _start(self, flows: dict[str, _Flow[Item]], key: str) -> None:
        """Start a key's flow. The deficit of a key that waited alone is reset: no other key lost a turn."""
        owned = {other: self._sent(other) for other in (key, *flows)}
        least = min(owned.values())
        flows[key] = _Flow(deficit=least - owned[key])
        if len(flows) == 2:
            other = next(iter(flows))
            flows[other].deficit = least - owned[other]
