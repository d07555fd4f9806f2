"""Request bodies, as OpenAI and vLLM define them. Unknown fields are ignored."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidRequestError
from router.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    speculative: dict[str, Any] | None = None

    best_of: Any = None
    use_beam_search: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    truncate_prompt_tokens: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    suffix: Any = None
    prompt_embeds: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    echo: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": ([],),
    "echo": (False,),
    "logits_processors": ([],),
}
"""Values of unsupported fields that change nothing."""

_UNSUPPORTED = {
    body: tuple(field.name for field in msgspec.structs.fields(body) if field.type is Any)
    for body in (CompletionBody, ChatBody)
}


def decode_body(raw: bytes, body_type: type[T]) -> T:
    """Raises `ApiError` 400 that names the field, and 400 for what is no JSON."""
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _syntax_error(raw, error) from error
    if isinstance(body, CompletionBody | ChatBody):
        _refuse_unsupported(body)
    return body


def _refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    for name in _UNSUPPORTED[type(body)]:
        value = getattr(body, name)
        if value is None or value in _HARMLESS.get(name, ()):
            continue
        if name == "best_of" and value == (body.n or 1):
            continue
        raise InvalidRequestError(name, "is not supported")


_AT = re.compile(r" - at (`key` in )?`\$\.?(.*?)`$")


def _type_error(text: str) -> ApiError:
    match = _AT.search(text)
    reason = _AT.sub("", text).replace("`", "")
    if match is None:
        missing = re.search(r"missing required field (\w+)", reason)
        param = missing.group(1) if missing else None
    else:
        param = match.group(2) or None
    reason = reason[0].lower() + reason[1:]
    return ApiError(400, f"{param or 'body'}: {reason}", param=param, code="invalid_type")


def _syntax_error(raw: bytes, error: Exception) -> ApiError:
    field = _non_finite_field(raw)
    if field is not None:
        return ApiError(400, f"{field}: must be a finite number", param=field, code="invalid_value")
    return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")


def _non_finite_field(raw: bytes) -> str | None:
    """Python's own parser takes NaN and Infinity, so it can tell which field has one."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(body, dict):
        for name, value in body.items():
            if _has_non_finite(value):
                return str(name)
    return None


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_has_non_finite(item) for item in value.values())
    return isinstance(value, list) and any(_has_non_finite(item) for item in value)
