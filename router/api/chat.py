"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol.errors import InvalidRequestError
from router.api.generation import make_generation, stream_flags
from router.choice import Prompt
from router.exchange import Exchange
from router.formats import ChatFormat, OutputOptions
from router.openai_types import ChatBody, ChatMessage, decode_body
from router.registry import ModelFacts
from router.serving import serve_generation
from router.state import RouterState
from router.validation import (
    check_model,
    check_prompt,
    num_choices,
    room_for_tokens,
    sampling_params,
    text_options,
    with_max_tokens,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Chat:
    """Messages in, the assistant's next one out."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, exchange: Exchange) -> None:
        arrival = time.monotonic()
        state = self._state
        body = decode_body(await exchange.read_body(state.config.max_body_bytes), ChatBody)
        check_model(state.config, body.model)
        model = state.require_ready()
        output = _output_options(body)
        text = text_options(body)
        limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        try:
            params = sampling_params(
                body,
                logprobs=output.num_top,
                prompt_logprobs=body.prompt_logprobs,
                tokenizer=state.tokenizer,
                model=model,
                config=state.config,
            )
        except InvalidRequestError as error:
            raise _in_chat_terms(error) from error
        n = num_choices(body, 1, state.config)
        prompt = await self._prompt(body, model)
        asked = getattr(body, limit_field)
        params = with_max_tokens(params, room_for_tokens(asked, None, prompt, limit_field, model))
        generation = make_generation(state, body, [(prompt, params)], n, text, output, arrival)
        answer = ChatFormat(state.tokenizer, state.config.model_name, exchange.request_id, output)
        await serve_generation(exchange, state.dispatcher, generation, answer, output.stream)

    async def _prompt(self, body: ChatBody, model: ModelFacts) -> Prompt:
        proceed = bool(body.continue_final_message)
        if proceed and body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "cannot be combined with add_generation_prompt"
            )
        add_prompt = not proceed if body.add_generation_prompt is None else body.add_generation_prompt
        text = self._state.tokenizer.chat_template.render(
            plain_messages(body.messages),
            add_generation_prompt=add_prompt,
            continue_final_message=proceed,
            variables=body.chat_template_kwargs,
        )
        token_ids = await self._state.tokenizer.encode_prompt(
            text, bool(body.add_special_tokens), model.max_model_len, "messages"
        )
        prompt = Prompt(token_ids, text)
        check_prompt(prompt, "messages", model)
        return prompt


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Role and text of each, for the chat template. Raises `InvalidRequestError` for what isn't text."""
    if not messages:
        raise InvalidRequestError("messages", "must not be empty")
    plain = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.role not in _ROLES:
            known = ", ".join(_ROLES)
            raise InvalidRequestError(f"{at}.role", f"must be one of {known}; got {message.role!r}")
        for field in ("tool_calls", "function_call", "audio"):
            if getattr(message, field):
                raise InvalidRequestError(f"{at}.{field}", "is not supported")
        fields = {"role": _ROLES[message.role], "content": _text(message, at)}
        if message.name is not None:
            fields["name"] = message.name
        plain.append(fields)
    return plain


def _text(message: ChatMessage, at: str) -> str:
    content = message.content
    if content is None:
        raise InvalidRequestError(f"{at}.content", "is required")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise InvalidRequestError(
                f"{at}.content[{index}].type", f"only 'text' parts are supported, got {part.type!r}"
            )
        if part.text is None:
            raise InvalidRequestError(f"{at}.content[{index}].text", "is required")
        texts.append(part.text)
    return "\n".join(texts)


def _output_options(body: ChatBody) -> OutputOptions:
    stream, include_usage, continuous_usage = stream_flags(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "only allowed with logprobs=true")
    if stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream=true")
    return OutputOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        num_top=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_top=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _in_chat_terms(error: InvalidRequestError) -> InvalidRequestError:
    if error.field == "logprobs":
        return InvalidRequestError("top_logprobs", error.message)
    return error
