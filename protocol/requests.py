"""Requests, as the router gives them to workers and workers to each other."""

from __future__ import annotations

from math import inf
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.adapters import Adapter
from protocol.ids import Id, Seconds, TokenIds
from protocol.peers import PeerAddress
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES, Method, RequestSpeculation


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place where a request's drafts are made, and the most tokens of one draft. Without a method none
    are made.

    Without `at` the decode worker drafts, else the draft worker with that id.
    """

    method: Method | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TREE_NODES)] = MAX_TREE_NODES
    at: PeerAddress | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. A worker that is gone emitted `output_token_ids` before.

    Without a `draft_plan` the decode worker drafts as the deployment and the request say, by `suffix` also
    from the client's `prediction`. Steps that compute prompts in the same batch keep within `slo_tpot_s`,
    the time per output token that its client asked for.
    """

    request_id: Id
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    output_token_ids: TokenIds = []
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    timeout_s: Seconds = 600.0
    slo_tpot_s: Annotated[float, Meta(gt=0)] = inf
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    adapter: Adapter | None = None
    speculation: RequestSpeculation | None = None
    prediction: TokenIds = []
    draft_plan: DraftPlan | None = None

    @property
    def tenant(self) -> tuple[str, str]:
        """Return the salt and the adapter: only requests with the same ones share KV."""
        return self.cache_salt, self.adapter.digest if self.adapter is not None else ""
