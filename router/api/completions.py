"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time

from protocol.errors import InvalidRequestError
from protocol.sampling import SamplingParams
from router.api.generation import make_generation, stream_flags
from router.choice import Prompt
from router.exchange import Exchange
from router.formats import CompletionFormat, OutputOptions
from router.openai_types import CompletionBody, decode_body
from router.registry import ModelFacts
from router.serving import serve_generation
from router.state import RouterState
from router.validation import (
    check_model,
    check_prompt,
    check_token_ids,
    num_choices,
    room_for_tokens,
    sampling_params,
    text_options,
    with_max_tokens,
)

DEFAULT_MAX_TOKENS = 16


class Completions:
    """Text in, text out."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, exchange: Exchange) -> None:
        arrival = time.monotonic()
        state = self._state
        body = decode_body(await exchange.read_body(state.config.max_body_bytes), CompletionBody)
        check_model(state.config, body.model)
        model = state.require_ready()
        output = _output_options(body)
        text = text_options(body)
        params = sampling_params(
            body,
            logprobs=body.logprobs,
            prompt_logprobs=_prompt_logprobs(body),
            tokenizer=state.tokenizer,
            model=model,
            config=state.config,
        )
        sources = _prompt_sources(body.prompt)
        n = num_choices(body, len(sources), state.config)
        prompts = await asyncio.gather(*(self._prompt(source, body, model) for source in sources))
        limited = [(prompt, _limited(body, params, prompt, model)) for prompt in prompts]
        generation = make_generation(state, body, limited, n, text, output, arrival)
        answer = CompletionFormat(state.tokenizer, state.config.model_name, exchange.request_id, output)
        await serve_generation(exchange, state.dispatcher, generation, answer, output.stream)

    async def _prompt(self, source: str | list[int], body: CompletionBody, model: ModelFacts) -> Prompt:
        if isinstance(source, str):
            special = body.add_special_tokens is not False
            token_ids = await self._state.tokenizer.encode_prompt(
                source, special, model.max_model_len, "prompt"
            )
            prompt = Prompt(token_ids, source)
        else:
            check_token_ids("prompt", source, model.vocab_size)
            prompt = Prompt(source)
        check_prompt(prompt, "prompt", model)
        return prompt


def _prompt_sources(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either."""
    if prompt is None:
        raise InvalidRequestError("prompt", "is required")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt", "must not be empty")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError("prompt", "must be all strings, all token ids, or all lists of token ids")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _output_options(body: CompletionBody) -> OutputOptions:
    stream, include_usage, continuous_usage = stream_flags(body)
    if stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream=true")
    return OutputOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        echo=bool(body.echo),
        only_prompt=_only_prompt(body),
        num_top=body.logprobs,
        num_prompt_top=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _only_prompt(body: CompletionBody) -> bool:
    """`max_tokens` 0 with `echo` asks for the prompt alone, mostly for its log-probabilities."""
    return bool(body.echo) and body.max_tokens == 0


def _prompt_logprobs(body: CompletionBody) -> int | None:
    if not body.echo or body.logprobs is None:
        return body.prompt_logprobs
    return max(body.logprobs, body.prompt_logprobs or 0)


def _limited(
    body: CompletionBody, params: SamplingParams, prompt: Prompt, model: ModelFacts
) -> SamplingParams:
    asked = 1 if _only_prompt(body) else body.max_tokens
    return with_max_tokens(params, room_for_tokens(asked, DEFAULT_MAX_TOKENS, prompt, "max_tokens", model))
