"""From a request's body to what is served.

`completion` and `chat` read top to bottom: decode, check, sampling parameters, tokenize, choices. Nothing
here waits, so it runs in the event loop for small bodies and in a thread for large ones.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from protocol.adapters import Adapter
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError, TandemError
from protocol.kv_events import CacheFormat
from protocol.sampling import SamplingParams, check_sampling_params
from protocol.speculation import check_request_speculation, parse_request_speculation
from router.chats import Chats
from router.choice import Choice, Echo, Prompt
from router.decoding import decode_body, decode_object, refuse_unsupported
from router.errors import ApiError
from router.formats import OutputOptions
from router.grammar_request import GrammarRequest, grammar_request
from router.journal import Generation
from router.openai_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    PoolingBody,
    TokenizeBody,
)
from router.prompts import check_prompt, check_token_ids, decode_prompts
from router.registry import ModelFacts
from router.thinking import ThinkingBudget
from router.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16

_AS_GIVEN = (
    *("temperature", "top_k", "top_p", "min_p", "min_tokens", "stop_token_ids", "logit_bias", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields that mean the same to `SamplingParams`, which has their defaults."""


class Built(NamedTuple):
    """A generation that is ready to start, and what the client wants to see of it."""

    generation: Generation
    output: OutputOptions
    grammar: GrammarRequest | None = None
    """What is to be compiled before it starts."""
    warning: str | None = None
    """What of the request has no effect."""
    renamed: Callable[[InvalidRequestError], TandemError] = lambda error: error
    """An error about the grammar, with the field as the client calls it."""


class RequestBuilder:
    """Checks every limit. Raises `ApiError` or `InvalidRequestError`, which name the field.

    `find` tells what a request's `model` means, as `AdapterTable.find`; `formats` how the workers identify
    blocks, so that prompts are hashed here, not in the event loop.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        chats: Chats,
        find: Callable[[str | None], Adapter | None],
        formats: Callable[[], Collection[CacheFormat]] = tuple,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._find = find
        self._formats = formats
        self._chats = chats

    def completion(self, raw: bytes, model: ModelFacts, arrival: float) -> Built:
        body = decode_body(raw, CompletionBody)
        adapter = self._find(body.model)
        refuse_unsupported(body)
        only_prompt = bool(body.echo) and body.max_tokens == 0
        output = _output_options(body, body.logprobs, echo=bool(body.echo), only_prompt=only_prompt)
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        params = self._sampling_params(body, model, body.logprobs, prompt_logprobs)
        sources = decode_prompts(bytes(body.prompt), lambda count: self._check_number(body, count))
        asked = 1 if only_prompt else body.max_tokens
        kept = _kept(body, DEFAULT_MAX_TOKENS if asked is None else asked, model)
        special = body.add_special_tokens is not False
        prompts = [self._prompt(source, special, "prompt", kept, model) for source in sources]
        if output.echo:
            texts = [source if isinstance(source, str) and kept is None else None for source in sources]
            pairs = zip(prompts, texts, strict=True)
            prompts = [self._with_echo(prompt, text, special, output) for prompt, text in pairs]
        limited = [
            (prompt, _limited(params, asked, DEFAULT_MAX_TOKENS, prompt, "max_tokens", model))
            for prompt in prompts
        ]
        return Built(self._generation(body, limited, output, arrival, adapter), output, grammar_request(body))

    def chat(self, raw: bytes, model: ModelFacts, arrival: float) -> Built:
        return self.chat_of(decode_body(raw, ChatBody), model, arrival)

    def chat_of(self, body: ChatBody, model: ModelFacts, arrival: float) -> Built:
        adapter = self._find(body.model)
        refuse_unsupported(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs", "only allowed with logprobs=true")
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "cannot be combined with add_generation_prompt"
            )
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        output = _output_options(body, num_top)
        text, parsing, thinking, grammar, warning = self._chats.read(body)
        output = msgspec.structs.replace(output, parsing=parsing)
        try:
            params = self._sampling_params(body, model, num_top, body.prompt_logprobs)
        except InvalidRequestError as error:
            field = "top_logprobs" if error.field == "logprobs" else error.field
            raise InvalidRequestError(field, error.message) from error
        self._check_number(body, 1)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(body, field)
        kept = _kept(body, asked or 1, model)
        prompt = self._prompt(text, bool(body.add_special_tokens), "messages", kept, model)
        limited = [(prompt, _limited(params, asked, None, prompt, field, model))]
        generation = self._generation(body, limited, output, arrival, adapter, thinking)
        return Built(generation, output, grammar, warning)

    def embeddings(
        self,
        body: PoolingBody,
        sources: Sequence[tuple[str, str | list[int]]],
        model: ModelFacts,
        arrival: float,
    ) -> Built:
        """`sources` are texts or tokens, each with the field that it is of."""
        if not self._config.enable_embeddings:
            raise InvalidRequestError("model", "this server gives no embeddings (--enable-embeddings)")
        asked = CompletionBody(
            priority=body.priority,
            cache_salt=body.cache_salt,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        adapter, kept = self._find(body.model), _kept(asked, 1, model)
        special = body.add_special_tokens is not False
        params = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)
        prompts = [(self._prompt(source, special, field, kept, model), params) for field, source in sources]
        output = OutputOptions()
        return Built(self._generation(asked, prompts, output, arrival, adapter), output)

    def tokenize(self, raw: bytes, model: ModelFacts) -> bytes:
        body = decode_body(raw, TokenizeBody)
        self._find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", "either prompt or messages is required, not both")
        field, text, special = "prompt", body.prompt or "", body.add_special_tokens is not False
        if body.messages is not None:
            field, special = "messages", bool(body.add_special_tokens)
            text = self._chats.render(body)
        token_ids = self._tokenizer.encode_prompt(text, special, model.max_model_len, field)
        strings = None
        if body.return_token_strs:
            strings = [self._tokenizer.token_string(token_id) for token_id in token_ids]
        answer = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
        return msgspec.json.encode(answer)

    def detokenize(self, raw: bytes, model: ModelFacts) -> bytes:
        body = decode_body(raw, DetokenizeBody)
        self._find(body.model)
        if len(body.tokens) > model.max_model_len:
            raise InvalidRequestError("tokens", f"at most {model.max_model_len}, got {len(body.tokens)}")
        check_token_ids("tokens", body.tokens, model)
        return msgspec.json.encode({"prompt": self._tokenizer.decode(body.tokens, False)})

    # --- prompts ------------------------------------------------------------------------------------

    def _prompt(
        self, source: str | list[int], special: bool, field: str, kept: int | None, model: ModelFacts
    ) -> Prompt:
        """Of the text or the tokens, or the `kept` ones at their end."""
        if isinstance(source, str) and kept is not None:
            prompt = Prompt(self._tokenizer.encode_end(source, special, kept))
        elif isinstance(source, str):
            limit = model.max_model_len
            prompt = Prompt(self._tokenizer.encode_prompt(source, special, limit, field))
        else:
            prompt = Prompt(source if kept is None else source[-kept:])
        check_prompt(prompt, field, model)
        if not isinstance(source, str):
            check_token_ids(field, prompt.token_ids, model)
        return prompt

    def _with_echo(self, prompt: Prompt, text: str | None, special: bool, output: OutputOptions) -> Prompt:
        """A text is told as it came. Where its tokens begin in it is found out only if that is asked for."""
        if text is None:
            echo = self._tokenizer.echo_tokens(prompt.token_ids, output.skip_special_tokens)
        elif output.keep_details:
            echo = self._tokenizer.echo(text, special)
        else:
            echo = Echo(text, [])
        return msgspec.structs.replace(prompt, echo=echo)

    # --- parameters ---------------------------------------------------------------------------------

    def _check_number(self, body: GenerationBody, num_prompts: int) -> None:
        n = body.n or 1
        if n * num_prompts > self._config.max_n:
            raise InvalidRequestError(
                "n" if num_prompts == 1 else "prompt",
                f"{num_prompts} prompts times n={n} exceed the limit of {self._config.max_n} sequences "
                "(--max-n)",
            )

    def _sampling_params(
        self,
        body: GenerationBody,
        model: ModelFacts,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """All but `max_tokens`, the grammar and the seeds of further choices."""
        allowed = body.allowed_token_ids
        given = {name: value for name in _AS_GIVEN if (value := getattr(body, name)) is not None}
        params = SamplingParams(
            max_tokens=model.max_model_len,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            banned_token_sequences=self._bad_words(body.bad_words or []),
            allowed_token_ids=None if allowed is None else sorted(set(allowed)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **given,
        )
        check_sampling_params(params, model.vocab_size, self._config.max_logprobs)
        return params

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as spelled on its own and, where that is another token, after a space."""
        sequences = []
        for word in words:
            stripped = word.lstrip(" ")
            if not stripped:
                raise InvalidRequestError("bad_words", "each must have a character other than a space")
            bare = self._tokenizer.encode(stripped, add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + stripped, add_special_tokens=False)
            sequences.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return sequences

    def _generation(
        self,
        body: GenerationBody,
        prompts: Sequence[tuple[Prompt, SamplingParams]],
        output: OutputOptions,
        arrival: float,
        adapter: Adapter | None,
        thinking: ThinkingBudget | None = None,
    ) -> Generation:
        """`n` choices of each prompt, with the seeds that the prompt would get alone."""
        if body.disaggregate and not self._config.disaggregation:
            raise InvalidRequestError(
                "disaggregate", "this server has no prefill workers (--no-disaggregation)"
            )
        speculation = parse_request_speculation(decode_object(body.speculative, "speculative"))
        check_request_speculation(speculation, self._config.speculative_config)
        skip = output.skip_special_tokens
        keep = frozenset() if output.parsing is None else output.parsing.markers
        choices: list[tuple[Choice, SamplingParams]] = []
        for prompt, params in prompts:
            for cache in self._formats():
                prompt.blocks(cache, body.cache_salt or "", adapter)
            offset = 0 if prompt.echo is None else len(prompt.echo.text)
            for index in range(body.n or 1):
                choice = Choice(
                    len(choices),
                    prompt,
                    self._tokenizer.detokenizer(prompt.token_ids, skip, keep),
                    stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
                    include_stop=bool(body.include_stop_str_in_output),
                    min_tokens=params.min_tokens,
                    keep_details=output.keep_details,
                    offset=offset,
                )
                seed = params.seed if index == 0 else derived_seed(params.seed, index)
                choices.append((choice, msgspec.structs.replace(params, seed=seed)))
        return Generation(
            choices,
            arrival=arrival,
            timeout_s=self._config.request_timeout,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            adapter=adapter,
            speculation=speculation,
            split=body.disaggregate,
            thinking=thinking,
        )


def _kept(body: GenerationBody, num_output: int, model: ModelFacts) -> int | None:
    """How many tokens of the prompt's end are asked for; None: all."""
    kept, limit = body.truncate_prompt_tokens, model.max_model_len
    if kept is None:
        return None
    if kept != -1 and not 1 <= kept < limit:
        raise InvalidRequestError(
            "truncate_prompt_tokens", f"must be -1 or in [1, max_model_len - 1 = {limit - 1}], got {kept}"
        )
    return kept if kept > 0 else max(1, limit - max(1, num_output))


def derived_seed(seed: int, index: int) -> int:
    """The seed of a further choice: deterministic and well spread, in [0, 2**63)."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8, person=b"tandem-choice").digest()
    return int.from_bytes(digest, "little") >> 1


def _output_options(
    body: GenerationBody, num_top: int | None, *, echo: bool = False, only_prompt: bool = False
) -> OutputOptions:
    """`only_prompt`: `max_tokens` 0 with `echo` asks for the prompt, mostly for its log-probabilities."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise InvalidRequestError("stream_options", "only allowed with stream=true")
    if stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs", "is not available with stream=true")
    include_usage = options is not None and bool(options.include_usage)
    return OutputOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        echo=echo,
        only_prompt=only_prompt,
        num_top=num_top,
        num_prompt_top=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_timing=bool(body.return_timing),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _limited(
    params: SamplingParams,
    asked: int | None,
    default: int | None,
    prompt: Prompt,
    field: str,
    model: ModelFacts,
) -> SamplingParams:
    """With `max_tokens`. Asking for more than fits is an error, a default is cut to fit."""
    room = model.max_model_len - len(prompt.token_ids)
    if asked is None:
        asked = room if default is None else min(default, room)
    if asked < 1:
        raise InvalidRequestError(field, f"must be at least 1, got {asked}")
    if asked > room:
        raise ApiError(
            400,
            f"{field}: the model's maximum context length is {model.max_model_len} tokens; "
            f"{len(prompt.token_ids)} are in the prompt and {asked} were asked for",
            param=field,
            code="context_length_exceeded",
        )
    if params.min_tokens > asked:
        raise InvalidRequestError(
            "min_tokens", f"must be in [0, max_tokens={asked}], got {params.min_tokens}"
        )
    return msgspec.structs.replace(params, max_tokens=asked)
