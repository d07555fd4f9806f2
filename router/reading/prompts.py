"""Decodes and checks a body's prompts: texts or token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from protocol.errors import InvalidRequestError
from router.decoding import decode_field
from router.errors import ApiError
from router.reading.served import ServedModel

_LIST_START = re.compile(rb"\[\s*(.)")


def decode_prompts(
    raw: bytes, check_number: Callable[[int], object], field: str = "prompt"
) -> list[str] | list[list[int]]:
    """Decode a text, a list of token ids, or a list of either.

    The number of prompts is counted in the JSON text, so that a million lists are refused before they are
    created.
    """
    start = _LIST_START.match(raw)
    prompts: list[str] | list[list[int]]
    if start is not None and start[1] == b'"':
        plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        check_number(plain.count(b'"') // 2)
        prompts = decode_field(raw, field, list[str])
    elif start is not None and start[1] == b"[":
        check_number(raw.count(b"[") - 1)
        prompts = decode_field(raw, field, list[list[int]])
    else:
        check_number(1)
        prompts = [decode_field(raw, field, str if start is None else list[int])]
    if prompts == [None]:
        raise InvalidRequestError(field, "is required")
    return prompts


def check_token_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        raise InvalidRequestError(field, f"token ids must be in [0, {model.vocab_size - 1}]")


def check_prompt(token_ids: Sequence[int], field: str, model: ServedModel) -> None:
    """Raise if the prompt is empty or leaves no room for one more token."""
    if not token_ids:
        raise InvalidRequestError(field, "must not be empty")
    if len(token_ids) >= model.max_model_len:
        raise ApiError(
            400,
            f"{field}: its {len(token_ids)} tokens leave no room for an answer within the model's "
            f"maximum context length of {model.max_model_len} tokens",
            param=field,
            code="context_length_exceeded",
        )
