"""What decode workers and draft workers tell each other of the requests that the latter draft for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.bounded import Count, Id, TokenId
from protocol.sampling import SamplingParams
from protocol.speculation import MAX_TREE_NODES

MAX_GIVEN_TOKENS = 2**14
"""In one `Given`: longer texts come in several messages."""
MAX_TOLD = 4096
"""Requests of each kind in one message."""
DRAFT_LEASE_S = 30.0
"""For which a draft worker keeps a request after its latest news: the decode worker may be gone, and the
router's word of that lost. If not, the next news open the request anew."""


class DraftOpening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a draft worker must know of a request beside its tokens: how to sample, and that the first
    `num_prompt` of them are the prompt.
    """

    sampling: SamplingParams
    num_prompt: Annotated[int, Meta(ge=1, lt=2**31)]
    cache_salt: Annotated[str, Meta(max_length=256)] = ""


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request's target has committed from place `start` on, and how many tokens beyond it has use for.

    Each time that a decode worker opens the request anew, the `epoch` is another, higher one. `opening` comes
    with the first tokens. While it has use for none, more of what is committed may follow.
    """

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_GIVEN_TOKENS)] = []
    run_ahead: Annotated[int, Meta(ge=0, le=2 * MAX_TREE_NODES + 1)] = 0
    opening: DraftOpening | None = None


class DraftKey(msgspec.Struct, frozen=True, array_like=True):
    """A request in one of its epochs."""

    request_id: Id
    epoch: Count


class DraftFor(msgspec.Struct, frozen=True, kw_only=True, tag="draft_for"):
    """News of the requests that a decode worker wants drafts for, and which it wants none for any more.

    Each message has a higher `number` than those before it, and is answered, at the latest after a step. What
    comes after a later one counts as lost. Ends are told until a message with them is answered.
    """

    incarnation: Id
    number: Count
    given: Annotated[list[Given], Meta(max_length=MAX_TOLD)] = []
    ended: Annotated[list[DraftKey], Meta(max_length=MAX_TOLD)] = []


class DraftedChain(msgspec.Struct, frozen=True, array_like=True):
    """A request's draft: the tokens that may follow its first `start` ones, all that is known of them."""

    request_id: Id
    epoch: Count
    start: Count
    token_ids: Annotated[list[TokenId], Meta(max_length=2 * MAX_TREE_NODES + 1)]


class DraftBehind(msgspec.Struct, frozen=True, array_like=True):
    """The draft worker lacks what the target committed from place `num_tokens` on; 0: it has nothing."""

    request_id: Id
    epoch: Count
    num_tokens: Count


class Drafts(msgspec.Struct, frozen=True, kw_only=True, tag="drafts"):
    """What a draft worker has for a decode worker, whose newest message was `number`. It drafts no more for
    those that it has `refused`.
    """

    incarnation: Id
    number: Count
    chains: Annotated[list[DraftedChain], Meta(max_length=MAX_TOLD)] = []
    behind: Annotated[list[DraftBehind], Meta(max_length=MAX_TOLD)] = []
    refused: Annotated[list[DraftKey], Meta(max_length=MAX_TOLD)] = []
