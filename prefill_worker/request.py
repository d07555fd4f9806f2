"""One request on a prefill worker, from its arrival to the decode worker's acknowledgement."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from protocol.handoff import DraftState, HandoffManifest, SamplingState, SegmentInfo
from protocol.ids import PeerAddress, token_ids_digest
from protocol.requests import EngineRequest
from protocol.worker_to_worker import Reserved
from worker.requests import StagedRequest


class PrefillStage(enum.Enum):
    WHOLE = "whole"
    """The engine here decodes the request too; no decode worker takes it over."""
    ASSIGNED = "assigned"
    """A decode worker is named, and is asked for blocks when the engine begins with the prompt."""
    RESERVING = "reserving"
    """This worker has asked the decode worker for blocks."""
    PUSHING = "pushing"
    """The decode worker has granted blocks, and this worker pushes the computed ones."""
    SENT = "sent"
    """The last blocks and the manifest are in flight."""
    SETTLING = "settling"
    """The decode worker runs the request, but the wire has not yet acknowledged the last blocks."""
    REDIRECTING = "redirecting"
    """The decode worker did not take the request, and the router has to name another one."""
    ENDED = "ended"


@dataclass(eq=False)
class PrefillRequest(StagedRequest[PrefillStage]):
    """A request whose prompt is computed here, with the state of its hand-over to `peer`.

    | stage                    | what happens                                                | next        |
    |--------------------------|-------------------------------------------------------------|-------------|
    | (new)                    | `Generate` without a decode worker                          | WHOLE       |
    | (new)                    | `Generate` with one                                         | ASSIGNED    |
    | ASSIGNED                 | the engine begins with the prompt, or began before          | RESERVING   |
    | RESERVING                | `Reserved`                                                  | PUSHING     |
    | PUSHING                  | the first token is there: all blocks and the manifest go    | SENT        |
    | SENT                     | `HandoffAck`                                                | SETTLING    |
    | SETTLING                 | the wire's acknowledgement or failure, the deadline         | ENDED       |
    | ASSIGNED to SENT         | the decode worker refuses, is gone, or lets the deadline    | REDIRECTING |
    |                          | pass; or a `Redirect`                                       |             |
    | REDIRECTING              | `Redirect` to a decode worker                               | ASSIGNED    |
    | REDIRECTING              | `Redirect` to none                                          | WHOLE       |
    | REDIRECTING              | the deadline                                                | ENDED       |
    | any but SETTLING         | the last token, an error that no other worker mends         | ENDED       |
    | any                      | `Abort`                                                     | ENDED       |

    The engine owns the blocks in every stage and keeps them until ENDED. The decode worker grants the lease,
    which the request holds from PUSHING to SETTLING. `num_pushed` counts the blocks that were pushed to the
    decode worker, without those that it had cached. `left_leases` holds the leases of decode workers from
    which the request was taken back.
    """

    next_stages: ClassVar[Mapping[Any, Collection[Any]]] = {
        PrefillStage.ASSIGNED: (PrefillStage.RESERVING, PrefillStage.REDIRECTING),
        PrefillStage.RESERVING: (PrefillStage.PUSHING, PrefillStage.REDIRECTING),
        PrefillStage.PUSHING: (PrefillStage.SENT, PrefillStage.REDIRECTING),
        PrefillStage.SENT: (PrefillStage.SETTLING, PrefillStage.REDIRECTING),
        PrefillStage.REDIRECTING: (PrefillStage.ASSIGNED, PrefillStage.WHOLE),
    }

    request: EngineRequest
    stage: PrefillStage
    peer: PeerAddress | None = None
    lease_id: str | None = None
    deadline: float | None = None
    taken_up: bool = False
    """Whether the engine has begun with the prompt."""
    first_token: int | None = None
    reserving_since: float = 0.0
    reserve_s: float = 0.0
    renew_at: float = 0.0
    grant: Reserved | None = None
    num_pushed: int = 0
    places: list[int] = field(default_factory=list)
    """The index of the next block to push, for each of our block tables."""
    delivered: bool = False
    """Whether the wire has acknowledged all blocks."""
    left_leases: set[str] = field(default_factory=set)

    @property
    def decode(self) -> PeerAddress:
        """The decode worker of the request, which is not WHOLE."""
        assert self.peer is not None
        return self.peer

    @property
    def granted(self) -> Reserved:
        """The decode worker's blocks, from stage PUSHING on."""
        assert self.grant is not None
        return self.grant

    @property
    def has_asked(self) -> bool:
        """Whether the decode worker was asked for blocks or holds some for the request."""
        return self.stage in (PrefillStage.RESERVING, PrefillStage.PUSHING, PrefillStage.SENT)

    @property
    def waits_for_engine(self) -> bool:
        """Whether nothing but the engine's next chunk of the prompt is missing."""
        return self.stage is PrefillStage.PUSHING and self.first_token is None

    def leave_peer(self, deadline: float) -> None:
        """Forget the grant and progress of `peer`; the router has until the deadline to name another one."""
        self.enter(PrefillStage.REDIRECTING)
        self.grant = None
        self.num_pushed = 0
        self.delivered = False
        self.deadline = deadline

    def manifest(
        self,
        worker_id: str,
        incarnation: str,
        segments: list[SegmentInfo],
        state_position: int,
        draft: DraftState,
    ) -> HandoffManifest:
        """Return the manifest of the hand-over, once all blocks are pushed and the first token is sampled."""
        assert self.first_token is not None
        return HandoffManifest(
            request_id=self.request_id,
            lease_id=self.held_lease,
            prefill_worker=worker_id,
            prefill_incarnation=incarnation,
            decode_incarnation=self.granted.incarnation,
            num_tokens=self.num_tokens,
            token_ids_digest=token_ids_digest(self.token_ids),
            segments=segments,
            state_position=state_position,
            extents=self.granted.extents,
            pushed_blocks=self.num_pushed,
            first_token=self.first_token,
            first_token_position=self.num_tokens,
            sampling=SamplingState(
                seed=self.request.sampling.seed, num_output_tokens=len(self.request.output_token_ids) + 1
            ),
            draft=draft,
            reserve_s=self.reserve_s,
        )
