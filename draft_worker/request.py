"""A request on a draft worker in one epoch, from its target's first tokens to its end."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from protocol.requests import EngineRequest
from protocol.worker_to_worker import DRAFT_LEASE_S, DraftKey, DraftOpening, DraftUpdate
from worker.requests import StagedRequest

ENGINE_TIMEOUT_S = 1e9


class DraftStage(enum.Enum):
    ARRIVING = "arriving"
    """The request's tokens arrive in pieces."""
    QUEUED = "queued"
    """All tokens have arrived; the request waits until the engine reads no other text of its target."""
    DRAFTING = "drafting"
    """The engine has the request, and drafts while its target can use more tokens."""
    ENDED = "ended"


@dataclass(eq=False)
class DraftRequest(StagedRequest[DraftStage]):
    """A request that the decode worker `target` runs.

    | stage    | what happens                                                | next     |
    |----------|-------------------------------------------------------------|----------|
    | (new)    | `DraftUpdate` with an opening                               | ARRIVING |
    | ARRIVING | the last of its tokens: its target has use for drafts       | QUEUED   |
    | QUEUED   | no other text of its target is being read                   | DRAFTING |
    | DRAFTING | a commit: the agreeing drafts stay, the rest is dropped     |          |
    | any      | `DraftFor` ends it or opens it again, its lease runs out,   |          |
    |          | it is refused, its tokens are invalid, its target is lost   | ENDED    |

    `committed` holds the target's committed tokens that have arrived in order. In DRAFTING the engine's
    sequence has them too, and owns the blocks. The target can use `num_wanted` tokens after them;
    `num_drafted` are drafted already.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]] = {
        DraftStage.ARRIVING: (DraftStage.QUEUED,),
        DraftStage.QUEUED: (DraftStage.DRAFTING,),
    }

    request: EngineRequest
    stage: DraftStage
    target: bytes
    key: DraftKey
    opening: DraftOpening
    committed: list[int] = field(default_factory=list)
    num_wanted: int = 0
    num_drafted: int = 0
    is_read: bool = False
    """Whether the engine has computed the KV of the request's text and drafted a token from it."""
    lease_id: str | None = None
    deadline: float | None = None

    @classmethod
    def open(cls, target: bytes, update: DraftUpdate, opening: DraftOpening) -> DraftRequest:
        name = name_of(target, update.request_id)
        # The prompt and the final sampling parameters are set once all tokens have arrived.
        request = EngineRequest(request_id=name, prompt_token_ids=[], sampling=opening.sampling)
        key = DraftKey(update.request_id, update.epoch)
        return cls(request, DraftStage.ARRIVING, target, key, opening)

    def engine_request(self) -> EngineRequest:
        """Return the request for the engine. Its whole text must have arrived."""
        opening = self.opening
        return EngineRequest(
            request_id=self.request_id,
            prompt_token_ids=self.committed[: opening.num_prompt],
            output_token_ids=self.committed[opening.num_prompt :],
            sampling=msgspec.structs.replace(opening.sampling, logprobs=None, prompt_logprobs=None),
            timeout_s=ENGINE_TIMEOUT_S,
            cache_salt=opening.cache_salt,
        )

    @property
    def hold_at(self) -> int:
        """The length up to which the request may grow."""
        longest = self.opening.num_prompt + self.opening.sampling.max_tokens
        return min(len(self.committed) + self.num_wanted, longest)

    @property
    def wants_row(self) -> bool:
        """Whether the request needs a row in the engine's batch."""
        return len(self.committed) + self.num_drafted < self.hold_at

    def renew(self, now: float) -> None:
        self.deadline = now + DRAFT_LEASE_S


def name_of(target: bytes, request_id: str) -> str:
    """Return the request's id in the engine, which is unique across targets."""
    return f"{target.decode(errors='replace')}/{request_id}"
