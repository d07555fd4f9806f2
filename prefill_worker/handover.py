"""One request's hand-over, from the prefill worker's side."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.handoff import DraftState, HandoffManifest, SamplingState, SegmentInfo
from protocol.ids import token_ids_digest
from protocol.messages import EngineRequest, ErrorKind, PeerAddress, Reserved

REDIRECTABLE: tuple[ErrorKind, ...] = ("worker_lost", "overloaded", "transfer", "timeout")
"""What may go better with another decode worker."""


@dataclass(eq=False)
class Handover:
    """Where a request stands between its arrival and the decode worker's acknowledgement.

    `taken_up`: the engine has begun with the prompt, and blocks may be reserved. `awaits_redirect`: `peer`
    did not take the request, and the router is asked for another. `deadline` (monotonic seconds) is None
    while nobody is asked for anything; the engine's own deadline holds then. `num_pushed` of our blocks,
    after those that the decode worker had cached, are queued for it or there.
    """

    request: EngineRequest
    peer: PeerAddress
    taken_up: bool = False
    awaits_redirect: bool = False
    deadline: float | None = None
    reserving_since: float = 0.0
    reserve_s: float = 0.0
    renew_at: float = 0.0
    grant: Reserved | None = None
    num_pushed: int = 0
    manifest_sent: bool = False
    left_leases: set[str] = field(default_factory=set)
    first_token: int | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def reserving(self) -> bool:
        """The decode worker has been asked for blocks."""
        return self.deadline is not None and not self.awaits_redirect

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose KV is handed over: the prompt, and what was emitted before a failover."""
        return self.request.prompt_token_ids + self.request.output_token_ids

    def first_pushed(self, block_size: int) -> int:
        """Which of our blocks, of `block_size` tokens, is the first that the decode worker lacks some of."""
        assert self.grant is not None
        return self.grant.cached_blocks * self.grant.block_size // block_size

    def leave_peer(self, deadline: float) -> None:
        """Forget what `peer` granted and got. Another is to be named until `deadline`."""
        if self.grant is not None:
            self.left_leases.add(self.grant.lease_id)
        self.grant = None
        self.num_pushed = 0
        self.manifest_sent = False
        self.awaits_redirect = True
        self.deadline = deadline

    def turn_to(self, peer: PeerAddress) -> None:
        """Begin again with another decode worker."""
        self.peer = peer
        self.awaits_redirect = False
        self.deadline = None


def make_manifest(
    handover: Handover,
    worker_id: str,
    incarnation: str,
    segments: list[SegmentInfo],
    draft: DraftState,
) -> HandoffManifest:
    """Describe a hand-over whose blocks are all pushed and whose first token is sampled."""
    assert handover.grant is not None and handover.first_token is not None
    token_ids = handover.token_ids
    return HandoffManifest(
        request_id=handover.request_id,
        lease_id=handover.grant.lease_id,
        prefill_worker=worker_id,
        prefill_incarnation=incarnation,
        decode_incarnation=handover.grant.incarnation,
        num_tokens=len(token_ids),
        token_ids_digest=token_ids_digest(token_ids),
        segments=segments,
        block_ids=handover.grant.block_ids,
        pushed_blocks=handover.num_pushed,
        first_token=handover.first_token,
        first_token_position=len(token_ids),
        sampling=SamplingState(
            seed=handover.request.sampling.seed,
            num_output_tokens=len(handover.request.output_token_ids) + 1,
        ),
        draft=draft,
        reserve_s=handover.reserve_s,
    )
