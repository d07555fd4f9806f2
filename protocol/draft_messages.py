"""Messages between decode workers and draft workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.ids import Count, Id, TokenId
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES

MAX_GIVEN_TOKENS = 2**14
"""The most tokens in one `Given`: longer texts come in several messages."""
MAX_TOLD = 4096
"""The most requests of each kind in one message."""
DRAFT_LEASE_S = 30.0
"""Seconds for which a draft worker keeps a request after its latest update: the decode worker may be gone,
and the router's message about that lost. Otherwise the next update opens the request again.
"""


class DraftOpening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample a request, and that the first `num_prompt` of its tokens are the prompt."""

    sampling: SamplingParams
    num_prompt: Annotated[int, Meta(ge=1, lt=2**31)]
    cache_salt: Annotated[str, Meta(max_length=256)] = ""


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that a request's target has committed from position `start` on, and how many more drafted
    tokens it can use.

    Each time a decode worker opens the request again, `epoch` is higher. `opening` comes with the first
    tokens. While the decode worker can use no drafts, more committed tokens may follow.
    """

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_GIVEN_TOKENS)] = []
    num_wanted: Annotated[int, Meta(ge=0, le=2 * MAX_TREE_NODES + 1)] = 0
    opening: DraftOpening | None = None


class DraftKey(msgspec.Struct, frozen=True, array_like=True):
    """A request in one of its epochs."""

    request_id: Id
    epoch: Count


class DraftFor(msgspec.Struct, frozen=True, kw_only=True, tag="draft_for"):
    """Updates of the requests that a decode worker wants drafts for, and the ids of requests that no longer
    need drafts.

    Each message has a higher `number` than those before it, and is answered at the latest after one step. A
    message that arrives after a later one is ignored. Ends are repeated until a message with them is
    answered.
    """

    incarnation: Id
    number: Count
    given: Annotated[list[Given], Meta(max_length=MAX_TOLD)] = []
    ended: Annotated[list[DraftKey], Meta(max_length=MAX_TOLD)] = []


class DraftedChain(msgspec.Struct, frozen=True, array_like=True):
    """A request's draft: all known tokens after its first `start` ones."""

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=2 * MAX_TREE_NODES + 1)]


class DraftBehind(msgspec.Struct, frozen=True, array_like=True):
    """The draft worker lacks the committed tokens from position `num_tokens` on; 0: it has none."""

    request_id: Id
    epoch: Count
    num_tokens: Count


class Drafts(msgspec.Struct, frozen=True, kw_only=True, tag="drafts"):
    """A draft worker's drafts, after message `number`. It drafts no more for the `refused` requests."""

    incarnation: Id
    number: Count
    chains: Annotated[list[DraftedChain], Meta(max_length=MAX_TOLD)] = []
    behind: Annotated[list[DraftBehind], Meta(max_length=MAX_TOLD)] = []
    refused: Annotated[list[DraftKey], Meta(max_length=MAX_TOLD)] = []
