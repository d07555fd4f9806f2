"""The requests of a worker, each in one of the stages of its role."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from protocol.requests import DraftPlan, EngineRequest

StageT = TypeVar("StageT", bound=enum.Enum)


class IllegalTransitionError(Exception):
    """A request was moved to a stage that cannot follow its current one: a bug of this worker."""


class StagedRequest(Generic[StageT]):
    """A request in one of the stages of its class. `next_stages` maps a stage to the stages that may follow
    it; ENDED may follow every other stage.

    `deadline` is in monotonic seconds, or None while nothing is awaited from another worker.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]]
    request: EngineRequest
    stage: StageT
    lease_id: str | None = None
    deadline: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def held_lease(self) -> str:
        """The id of the request's lease; the request must have one."""
        assert self.lease_id is not None
        return self.lease_id

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose KV is handed over: the prompt, and the tokens emitted before a failover."""
        return self.request.prompt_token_ids + self.request.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    def enter(self, stage: StageT) -> None:
        """Move to a stage. Raises `IllegalTransitionError` and changes nothing if it cannot follow."""
        ends = stage.name == "ENDED" and stage is not self.stage
        if not ends and stage not in self.next_stages.get(self.stage, ()):
            raise IllegalTransitionError(f"{self.request_id}: {self.stage.name} -> {stage.name}")
        self.stage = stage

    def replan(self, plan: DraftPlan | None) -> None:
        """Set the place where the request's drafts are made."""
        self.request = msgspec.structs.replace(self.request, draft_plan=plan)

    def is_overdue(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


RequestT = TypeVar("RequestT", bound=StagedRequest[Any])


class RequestTable(Generic[RequestT]):
    """Requests by id and by lease.

    An abandoned request may keep its lease longer than its id, until no transfer writes to its blocks.
    Meanwhile a newer request may have the id.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, RequestT] = {}
        self._by_lease: dict[str, RequestT] = {}

    def __len__(self) -> int:
        return len(self._by_id.keys() | {request.request_id for request in self._by_lease.values()})

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[RequestT]:
        """Iterate over the requests that own their ids, oldest first. The table may change meanwhile."""
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> RequestT | None:
        return self._by_id.get(request_id)

    def with_lease(self, lease_id: str) -> RequestT | None:
        return self._by_lease.get(lease_id)

    def insert(self, request: RequestT) -> None:
        assert request.request_id not in self._by_id
        self._by_id[request.request_id] = request

    def release_id(self, request: RequestT) -> None:
        """Free the request's id for another request. Idempotent."""
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]

    def grant_lease(self, request: RequestT, lease_id: str) -> None:
        request.lease_id = lease_id
        self._by_lease[lease_id] = request

    def drop_lease(self, request: RequestT) -> None:
        """Remove the request's lease. Idempotent."""
        if request.lease_id is not None:
            del self._by_lease[request.lease_id]
            request.lease_id = None
