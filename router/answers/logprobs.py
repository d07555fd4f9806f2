"""Log-probabilities in the formats of the two APIs. Lists are iterators, as they may be long."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, repeat
from typing import Any

from protocol.outputs import TokenLogprobs, paged_logprobs
from router.text.choice import Choice, ChoiceDelta
from router.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def token_name(tokenizer: Tokenizer, token_id: int, prefix: str = "bytes:") -> str:
    """Return the token's text, or its bytes spelled out if they are not text on their own."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer, choice: Choice, delta: ChoiceDelta, num_top: int, echo: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a completion, after those of the prompt if this delta echoes it.

    The alternatives at a position include the token itself.
    """
    prompt_echo = choice.prompt.echo if echo else None
    prompt_ids = choice.prompt.token_ids if prompt_echo is not None else []
    offsets = prompt_echo.offsets if prompt_echo is not None else []

    def names() -> Iterator[str]:
        return (token_name(tokenizer, token_id) for token_id in chain(prompt_ids, delta.token_ids))

    def entries() -> Iterator[TokenLogprobs | None]:
        known = chain(paged_logprobs(choice.prompt_logprobs), repeat(None))
        return chain(islice(known, len(prompt_ids)), delta.all_logprobs())

    def chosen(entry: TokenLogprobs | None) -> float | None:
        return None if entry is None else finite(entry.logprob)

    def alternatives(name: str, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        found = {token_name(tokenizer, other): finite(logprob) for other, logprob in _top(entry, num_top)}
        found.setdefault(name, finite(entry.logprob))
        return found

    return {
        "text_offset": chain(offsets, delta.offsets),
        "token_logprobs": map(chosen, entries()),
        "tokens": names(),
        "top_logprobs": map(alternatives, names(), entries()),
    }


def chat_logprobs(tokenizer: Tokenizer, delta: ChoiceDelta, num_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def told(token_id: int, entry: TokenLogprobs | None) -> dict[str, Any]:
        assert entry is not None
        item = _chat_token(tokenizer, token_id, entry.logprob)
        top = [_chat_token(tokenizer, other, logprob) for other, logprob in _top(entry, num_top)]
        return {**item, "top_logprobs": top}

    return {"content": map(told, delta.token_ids, delta.all_logprobs()), "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, choice: Choice, num_top: int
) -> Iterator[dict[str, dict[str, Any]] | None]:
    """Yield vLLM's `prompt_logprobs`: for each prompt token the alternatives and itself, by token id."""
    for token_id, entry in zip(choice.prompt.token_ids, paged_logprobs(choice.prompt_logprobs), strict=False):
        if entry is None:
            yield None
            continue
        ranked = [(token_id, entry.logprob, entry.rank)]
        ranked += [
            (other, logprob, rank) for rank, (other, logprob) in enumerate(_top(entry, num_top), start=1)
        ]
        yield {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_name(tokenizer, other),
            }
            for other, logprob, rank in ranked
        }


def _top(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    return zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id, prefix=""),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
