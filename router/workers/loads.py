"""The load that this router has put on each worker, updated at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from protocol.roles import Task
from router.workers.registry import Registry, Worker


class CountedRequest(Protocol):
    """A live request, or a simulated one."""

    assigned: dict[Task, Worker]
    waits_at: Worker | None
    num_uncached: int
    num_computed_by_decode: int

    @property
    def holders(self) -> Sequence[Worker]: ...

    @property
    def num_prefill_tokens(self) -> int: ...


class Loads:
    """Counts requests at their workers. Each part of a request's load is added once and removed once,
    however the request ends.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._order = itertools.count(1)

    def assign(self, request: CountedRequest, num_uncached: int) -> None:
        """Count an assigned request: its first worker has `num_uncached` tokens to compute before the first
        one comes.
        """
        first, decode = request.holders[0], request.assigned["decode"]
        request.waits_at, request.num_uncached = first, num_uncached
        request.num_computed_by_decode = num_uncached if first is decode else 0
        first.outstanding_prompts += 1
        first.outstanding_prefill_tokens += num_uncached
        self._take_row(request, decode)
        for worker in request.holders:
            worker.outstanding_requests += 1
            worker.load.last_placed = next(self._order)
            self._registry.changed(worker)

    def answered(self, request: CountedRequest) -> None:
        """Count the first token, which has come."""
        first, request.waits_at = request.waits_at, None
        if first is not None:
            first.outstanding_prompts -= 1
            first.outstanding_prefill_tokens -= request.num_uncached
            self._registry.changed(first)

    def leave_prefill(self, request: CountedRequest) -> None:
        """Remove the request from its prefill worker: the decode worker has it."""
        prefill = request.assigned.pop("prefill")
        prefill.outstanding_requests -= 1
        self._registry.changed(prefill)

    def move_decode(self, request: CountedRequest, target: Worker) -> None:
        """Move the request to another decode worker, which may be its prefill worker."""
        failed, prefill = request.assigned["decode"], request.assigned["prefill"]
        self._give_row_back(request)
        self._take_row(request, target)
        failed.outstanding_requests -= 1
        request.assigned["decode"] = target
        if target is prefill:
            request.assigned = {"decode": prefill}
        else:
            target.outstanding_requests += 1
            target.load.last_placed = next(self._order)
        for worker in (failed, target):
            self._registry.changed(worker)

    def release(self, request: CountedRequest) -> None:
        """Remove the request from all its workers."""
        self.answered(request)
        if request.assigned:
            self._give_row_back(request)
        for worker in request.holders:
            worker.outstanding_requests -= 1
            self._registry.changed(worker)
        request.assigned = {}

    @staticmethod
    def _take_row(request: CountedRequest, worker: Worker) -> None:
        worker.outstanding_rows += 1
        worker.outstanding_context += request.num_prefill_tokens
        worker.outstanding_computed += request.num_computed_by_decode

    @staticmethod
    def _give_row_back(request: CountedRequest) -> None:
        worker = request.assigned["decode"]
        worker.outstanding_rows -= 1
        worker.outstanding_context -= request.num_prefill_tokens
        worker.outstanding_computed -= request.num_computed_by_decode
