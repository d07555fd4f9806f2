"""Log-probabilities in the formats of the two APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocol.outputs import TokenLogprobs
from router.choice import Choice, ChoiceDelta
from router.tokenizer import Tokenizer

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
    token_ids, offsets = [*delta.token_ids], [*delta.offsets]
    entries: list[TokenLogprobs | None] = [*delta.logprobs]
    if echo and (prompt_echo := choice.prompt.echo) is not None:
        prompt_ids = choice.prompt.token_ids
        known = choice.prompt_logprobs[: len(prompt_ids)]
        entries = [*known, *[None] * (len(prompt_ids) - len(known)), *entries]
        offsets = [*prompt_echo.offsets, *offsets]
        token_ids = [*prompt_ids, *token_ids]
    tokens = [token_name(tokenizer, token_id) for token_id in token_ids]
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for name, entry in zip(tokens, entries, strict=True):
        if entry is None:
            chosen.append(None)
            top.append(None)
            continue
        alternatives = {
            token_name(tokenizer, other): finite(logprob) for other, logprob in _top(entry, num_top)
        }
        alternatives.setdefault(name, finite(entry.logprob))
        chosen.append(finite(entry.logprob))
        top.append(alternatives)
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}


def chat_logprobs(tokenizer: Tokenizer, delta: ChoiceDelta, num_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""
    content = []
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        item = _chat_token(tokenizer, token_id, entry.logprob)
        item["top_logprobs"] = [
            _chat_token(tokenizer, other, logprob) for other, logprob in _top(entry, num_top)
        ]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, choice: Choice, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token the alternatives and the token itself, by token
    id.
    """
    answer: list[dict[str, dict[str, Any]] | None] = []
    for token_id, entry in zip(choice.prompt.token_ids, choice.prompt_logprobs, strict=False):
        if entry is None:
            answer.append(None)
            continue
        ranked = [(token_id, entry.logprob, entry.rank)]
        ranked += [
            (other, logprob, rank) for rank, (other, logprob) in enumerate(_top(entry, num_top), start=1)
        ]
        answer.append(
            {
                str(other): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_name(tokenizer, other),
                }
                for other, logprob, rank in ranked
            }
        )
    return answer


def _top(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    return zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id, prefix=""),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
