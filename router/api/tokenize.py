"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio

import msgspec

from protocol.errors import InvalidRequestError
from router.api.chat import plain_messages
from router.exchange import Exchange
from router.openai_types import DetokenizeBody, TokenizeBody, decode_body
from router.state import RouterState
from router.validation import check_model, check_token_ids


class Tokenize:
    """Text or a chat to token ids."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, exchange: Exchange) -> None:
        state = self._state
        body = decode_body(await exchange.read_body(state.config.max_body_bytes), TokenizeBody)
        check_model(state.config, body.model)
        model = state.require_ready()
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", "either prompt or messages is required, not both")
        text = body.prompt
        if body.messages is not None:
            text = state.tokenizer.chat_template.render(
                plain_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        token_ids = await asyncio.to_thread(state.tokenizer.encode, text or "", special)
        strings = None
        if body.return_token_strs:
            strings = [state.tokenizer.token_string(token_id) for token_id in token_ids]
        answer = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
        await exchange.send_json(msgspec.json.encode(answer))


class Detokenize:
    """Token ids to text."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    async def __call__(self, exchange: Exchange) -> None:
        state = self._state
        body = decode_body(await exchange.read_body(state.config.max_body_bytes), DetokenizeBody)
        check_model(state.config, body.model)
        model = state.require_ready()
        check_token_ids("tokens", body.tokens, model.vocab_size)
        text = await asyncio.to_thread(state.tokenizer.decode, body.tokens, False)
        await exchange.send_json(msgspec.json.encode({"prompt": text}))
