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
    """News of the requests that a decode worker wants drafts for. Without any it asks whether the draft
    worker is there: each message is answered, at the latest after a step.
    """

    incarnation: Id
    given: Annotated[list[Given], Meta(max_length=4096)] = []
    ended: Annotated[list[DraftKey], Meta(max_length=4096)] = []


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
    """What a draft worker has for a decode worker. It drafts no more for those that it has `refused`."""

    incarnation: Id
    chains: Annotated[list[DraftedChain], Meta(max_length=4096)] = []
    behind: Annotated[list[DraftBehind], Meta(max_length=4096)] = []
    refused: Annotated[list[DraftKey], Meta(max_length=4096)] = []
