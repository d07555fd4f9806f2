"""What a body says as its prompt: texts, token ids or messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from protocol.errors import InvalidRequestError
from router.choice import Prompt
from router.decoding import decode_field, refuse_unsupported
from router.errors import ApiError
from router.openai_types import ChatMessage
from router.registry import ModelFacts

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_LIST_START = re.compile(rb"\[\s*(.)")


def decode_prompts(raw: bytes, check_number: Callable[[int], object]) -> list[str] | list[list[int]]:
    """A text, a list of token ids, or a list of either.

    The JSON text tells how many there are, so that a million lists are refused before they are made.
    """
    start = _LIST_START.match(raw)
    prompts: list[str] | list[list[int]]
    if start is not None and start[1] == b'"':
        plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        check_number(plain.count(b'"') // 2)
        prompts = decode_field(raw, "prompt", list[str])
    elif start is not None and start[1] == b"[":
        check_number(raw.count(b"[") - 1)
        prompts = decode_field(raw, "prompt", list[list[int]])
    else:
        check_number(1)
        prompts = [decode_field(raw, "prompt", str if start is None else list[int])]
    if prompts == [None]:
        raise InvalidRequestError("prompt", "is required")
    return prompts


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Role and text of each, for the chat template."""
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    plain = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]."
        if message.role not in _ROLES:
            raise InvalidRequestError(
                f"{at}role", f"must be one of {', '.join(_ROLES)}; got {message.role!r}"
            )
        refuse_unsupported(message, at)
        fields = {"role": _ROLES[message.role], "content": _text(message, at)}
        if message.name is not None:
            fields["name"] = message.name
        plain.append(fields)
    return plain


def _text(message: ChatMessage, at: str) -> str:
    content = message.content
    if content is None:
        raise InvalidRequestError(f"{at}content", "is required")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{at}content[{index}].type", f"only 'text' parts are supported, got {part.type!r}"
            )
        if part.text is None:
            raise InvalidRequestError(f"{at}content[{index}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)


def check_token_ids(field: str, token_ids: Sequence[int], model: ModelFacts) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        raise InvalidRequestError(field, f"token ids must be in [0, {model.vocab_size - 1}]")


def check_prompt(prompt: Prompt, field: str, model: ModelFacts) -> None:
    """It must have a token, and leave room for one."""
    if not prompt.token_ids:
        raise InvalidRequestError(field, "must not be empty")
    if len(prompt.token_ids) >= model.max_model_len:
        raise ApiError(
            400,
            f"{field}: its {len(prompt.token_ids)} tokens leave no room for an answer within the model's "
            f"maximum context length of {model.max_model_len} tokens",
            param=field,
            code="context_length_exceeded",
        )
