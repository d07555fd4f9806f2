"""Drafts that a draft worker makes: what has arrived of them, and what is wanted.

Nothing here waits. A request without a draft at hand decodes as if there were none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.ids import PeerAddress
from speculation.drafter import Drafter

Use = Literal["usable", "stale", "late"]
"""How an arriving chain compares with the committed tokens: it goes beyond them, differs, or ends before."""


@dataclass(eq=False)
class RemoteRequest:
    """A request whose drafts come from the draft worker `at`; `sequence` has its committed tokens.

    Its target verifies up to `granted` tokens in a step. `chain` is the newest draft: the tokens that may
    follow the first `start` ones.
    """

    sequence: SequenceState
    at: PeerAddress
    granted: int
    start: int = 0
    chain: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def num_wanted(self) -> int:
        """Tokens beyond the committed ones that it has use for: those that are verified now, the one that
        the target adds, and those for the next step.
        """
        return 2 * self.granted + 1 if self.granted else 0

    def take(self, start: int, token_ids: list[int]) -> Use:
        """A chain has arrived. It replaces the one that is there, unless that reaches further."""
        use = self._use(start, token_ids)
        if use == "usable" and start + len(token_ids) > self.start + len(self.chain):
            self.start, self.chain = start, token_ids
        return use

    def _use(self, start: int, token_ids: list[int]) -> Use:
        since = self.sequence.token_ids[start:]
        if start > len(self.sequence.token_ids) or since[: len(token_ids)] != token_ids[: len(since)]:
            return "stale"
        return "usable" if len(token_ids) > len(since) else "late"

    def draft(self, count: int) -> Draft | None:
        """Up to `count` tokens that may follow the committed ones, as far as the chain agrees with those."""
        if self.chain and self._use(self.start, self.chain) != "usable":
            self.start, self.chain = 0, []
        if not self.chain:
            return None
        first = len(self.sequence.token_ids) - self.start
        return Draft(self.chain[first : first + count])


class RemoteDrafter(Drafter):
    """Proposes what draft workers have sent. The decode worker's loop brings it, and takes what is wanted
    from `requests` and `ended`, between two steps.
    """

    def __init__(self, first_granted: int) -> None:
        """`first_granted` tokens are wanted before any plan of the controller."""
        self.requests: dict[str, RemoteRequest] = {}
        self.ended: list[RemoteRequest] = []
        """The requests that their draft workers must be told of."""
        self.answers: dict[str, float] = {}
        """Seconds until each draft worker's answer is there, on average. Written by the loop's thread."""
        self._first_granted = first_granted

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        plan = sequence.draft_plan
        assert plan is not None and plan.at is not None
        known = self.requests.get(sequence.request_id)
        if known is not None and known.at == plan.at:
            return  # it was preempted, which draft workers need not know
        self.forget(sequence.request_id)
        granted = min(self._first_granted, plan.max_tokens)
        self.requests[sequence.request_id] = RemoteRequest(sequence, plan.at, granted)

    def is_made_by(self, request_id: str, worker: PeerAddress | None) -> bool:
        """Whether the request's drafts come from there at present."""
        request = self.requests.get(request_id)
        return request is not None and request.at == worker

    def grant(self, request_id: str, num_tokens: int) -> None:
        """So many tokens of the request are verified in a step from now on."""
        request = self.requests.get(request_id)
        if request is not None:
            request.granted = num_tokens

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        requests = [self.requests[sequence.request_id] for sequence in sequences]
        return [request.draft(count) for request, count in zip(requests, counts, strict=True)]

    def forget(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.ended.append(request)
