"""The reading of request bodies: decoding, checks of all limits, and tokenizing of prompts.

No code here waits or depends on workers. It runs in the router for small bodies, else in the preprocessor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from protocol.sampling import SAMPLING_FIELDS, SamplingParams, check_sampling_params
from protocol.speculation import (
    RequestSpeculation,
    check_request_speculation,
    parse_request_speculation,
)
from router import openai_types as types
from router.answers.formats import OutputOptions
from router.decoding import decode_body, decode_object, decode_prompts, refuse_unsupported
from router.errors import too_long
from router.grammars.structured_outputs import AskedGrammar, asked_grammar
from router.reading.chats import Chats
from router.reading.prepared import Prepared, PreparedPrompt, ServedModel
from router.text.chat_template import plain_content, text_of
from router.text.choice import Echo
from router.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_PROMPT_LOGPROBS = 2**22
"""Most log-probabilities of prompts in a request, over all choices: some 60 MB in memory, 300 as JSON."""


class RequestReader:
    """A reader of all bodies. Raises `ApiError` or `InvalidRequestError` that names the field."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer, chats: Chats) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.chats = chats

    def completion(self, raw: bytes, model: ServedModel) -> Prepared:
        body = decode_body(raw, types.CompletionBody)
        model.check_name(body.model)
        refuse_unsupported(body)
        only_prompt = bool(body.echo) and body.max_tokens == 0
        output = _asked_output(body, body.logprobs, echo=bool(body.echo), only_prompt=only_prompt)
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        params = self._sampling_params(body, model, body.logprobs, prompt_logprobs)
        sources = decode_prompts(bytes(body.prompt), lambda count: self._check_number(body, count))
        asked = 1 if only_prompt else body.max_tokens
        kept = _kept(body, DEFAULT_MAX_TOKENS if asked is None else asked, model)
        special = body.add_special_tokens is not False
        prompts = []
        for source in sources:
            token_ids = self._token_ids(source, special, "prompt", kept, model)
            max_tokens = _max_tokens(params, asked, DEFAULT_MAX_TOKENS, len(token_ids), "max_tokens", model)
            prompt = PreparedPrompt(token_ids, max_tokens)
            if output.echo:
                text = source if isinstance(source, str) and kept is None else None
                prompt = self._with_echo(prompt, text, special, output)
            prompts.append(prompt)
        return self._prepared(body, prompts, params, output, asked_grammar(body))

    def chat(self, raw: bytes, model: ServedModel) -> Prepared:
        return self.chat_of(decode_body(raw, types.ChatBody), model)

    def chat_of(self, body: types.ChatBody, model: ServedModel) -> Prepared:
        model.check_name(body.model)
        refuse_unsupported(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs", "only allowed with logprobs=true")
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "cannot be combined with add_generation_prompt"
            )
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        output = _asked_output(body, num_top)
        text, parsing, grammar, warning = self.chats.read(body)
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
        token_ids = self._token_ids(text, bool(body.add_special_tokens), "messages", kept, model)
        most = _max_tokens(params, asked, None, len(token_ids), field, model)
        prompt = PreparedPrompt(token_ids, most, prediction=self._prediction(body, model))
        prepared = self._prepared(body, [prompt], params, output, grammar, warning)
        return msgspec.structs.replace(prepared, thinking_budget=body.thinking_token_budget)

    def chat_tokens(self, body: types.ChatBody, model: ServedModel) -> list[int]:
        """Return the tokens of a chat's prompt."""
        model.check_name(body.model)
        return self._token_ids(self.chats.read(body).prompt, False, "messages", None, model)

    def embeddings(
        self, body: types.PoolingBody, sources: Sequence[tuple[str, str | list[int]]], model: ServedModel
    ) -> Prepared:
        """Prepare the embedding of `sources`: field names with their texts or tokens."""
        if not self._config.enable_embeddings:
            raise InvalidRequestError("model", "this server gives no embeddings (--enable-embeddings)")
        model.check_name(body.model)
        asked = types.CompletionBody(
            model=body.model,
            priority=body.priority,
            cache_salt=body.cache_salt,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        kept = _kept(asked, 1, model)
        special = body.add_special_tokens is not False
        limit = self._config.max_queued_requests
        if len(sources) > limit:
            reason = f"{len(sources)} texts exceed the limit of {limit} sequences (--max-queued-requests)"
            raise InvalidRequestError(sources[-1][0], reason)
        params = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)
        texts = (self._token_ids(source, special, field, kept, model) for field, source in sources)
        prompts = [PreparedPrompt(token_ids, 1) for token_ids in texts]
        return self._prepared(asked, prompts, params, OutputOptions())

    def tokenize(self, raw: bytes, model: ServedModel) -> bytes:
        body = decode_body(raw, types.TokenizeBody)
        model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt", "either prompt or messages is required, not both")
        field, text, special = "prompt", body.prompt or "", body.add_special_tokens is not False
        if body.messages is not None:
            field, special = "messages", bool(body.add_special_tokens)
            text = self.chats.render(body)
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

    def detokenize(self, raw: bytes, model: ServedModel) -> bytes:
        body = decode_body(raw, types.DetokenizeBody)
        model.check_name(body.model)
        if len(body.tokens) > model.max_model_len:
            raise InvalidRequestError("tokens", f"at most {model.max_model_len}, got {len(body.tokens)}")
        model.check_token_ids("tokens", body.tokens)
        return msgspec.json.encode({"prompt": self._tokenizer.decode(body.tokens, False)})

    def _token_ids(
        self, source: str | list[int], special: bool, field: str, kept: int | None, model: ServedModel
    ) -> list[int]:
        """Return the source's tokens, or only its last `kept` tokens."""
        if isinstance(source, str) and kept is not None:
            token_ids = self._tokenizer.encode_end(source, special, kept)
        elif isinstance(source, str):
            token_ids = self._tokenizer.encode_prompt(source, special, model.max_model_len, field)
        else:
            token_ids = source if kept is None else source[-kept:]
        model.check_prompt(field, token_ids)
        if not isinstance(source, str):
            model.check_token_ids(field, token_ids)
        return token_ids

    def _with_echo(
        self, prompt: PreparedPrompt, text: str | None, special: bool, output: OutputOptions
    ) -> PreparedPrompt:
        """Return the prompt with its text and, only if the request needs them, the offsets of its tokens."""
        if text is None:
            echo = self._tokenizer.echo_tokens(prompt.token_ids, output.skip_special_tokens)
        elif output.keep_details:
            echo = self._tokenizer.echo(text, special)
        else:
            echo = Echo(text, [])
        return msgspec.structs.replace(prompt, echo=echo.text, echo_offsets=echo.offsets)

    def _prediction(self, body: types.ChatBody, model: ServedModel) -> list[int]:
        """Return the tokens of the predicted answer."""
        asked = body.prediction
        if asked is None:
            return []
        if asked.type != "content":
            raise InvalidRequestError("prediction.type", f"must be 'content', got {asked.type!r}")
        text = text_of(plain_content(asked.content, "prediction."))
        return self._tokenizer.encode_prompt(text, False, model.max_model_len, "prediction.content")

    def _check_number(self, body: types.GenerationBody, num_prompts: int) -> None:
        n, config = body.n or 1, self._config
        limit, flag = min((config.max_n, "--max-n"), (config.max_queued_requests, "--max-queued-requests"))
        if n * num_prompts > limit:
            raise InvalidRequestError(
                "n" if num_prompts == 1 else "prompt",
                f"{num_prompts} prompts times n={n} exceed the limit of {limit} sequences ({flag})",
            )

    def _sampling_params(
        self,
        body: types.GenerationBody,
        model: ServedModel,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Return all sampling parameters except `max_tokens`, the grammar and further choices' seeds."""
        allowed = body.allowed_token_ids
        chosen = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
        if "seed" not in chosen:
            chosen["seed"] = secrets.randbits(63) if self._config.seed is None else self._config.seed
        params = SamplingParams(
            max_tokens=model.max_model_len,
            banned_token_sequences=self._bad_words(body.bad_words or []),
            allowed_token_ids=None if allowed is None else sorted(set(allowed)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **model.defaults.sampling | chosen,
        )
        check_sampling_params(params, model.vocab_size, self._config.max_logprobs)
        return params

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Tokenize each word alone and, if this gives another token, also after a space."""
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

    def _stops(self, body: types.GenerationBody) -> list[str]:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        size = sum(map(len, stops))
        if size > types.MAX_STOP_CHARACTERS:
            reason = f"at most {types.MAX_STOP_CHARACTERS} characters in all, got {size}"
            raise InvalidRequestError("stop", reason)
        return stops

    def _prepared(
        self,
        body: types.GenerationBody,
        prompts: list[PreparedPrompt],
        params: SamplingParams,
        output: OutputOptions,
        grammar: AskedGrammar | None = None,
        warning: str | None = None,
    ) -> Prepared:
        if body.disaggregate and not self._config.disaggregation:
            raise InvalidRequestError(
                "disaggregate", "this server has no prefill workers (--no-disaggregation)"
            )
        speculation = parse_request_speculation(decode_object(body.speculative, "speculative"))
        if any(prompt.prediction for prompt in prompts):
            speculation = _from_prediction(speculation)
        check_request_speculation(speculation, self._config.speculative_config)
        _check_prompt_logprobs(prompts, body, params)
        return Prepared(
            model=body.model,
            prompts=prompts,
            params=params,
            output=output,
            n=body.n or 1,
            stop=self._stops(body),
            include_stop=bool(body.include_stop_str_in_output),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            speculation=speculation,
            split=body.disaggregate,
            grammar=grammar,
            warning=warning,
        )


def _from_prediction(asked: RequestSpeculation | None) -> RequestSpeculation:
    """Return the speculation of a request with a prediction: only the method `suffix` reads predictions."""
    asked = asked or RequestSpeculation()
    return asked if asked.method is not None else msgspec.structs.replace(asked, method="suffix")


def _kept(body: types.GenerationBody, num_output: int, model: ServedModel) -> int | None:
    """Return how many tokens at the end of the prompt to keep; None: all."""
    kept, limit = body.truncate_prompt_tokens, model.max_model_len
    if kept is None:
        return None
    if kept != -1 and not 1 <= kept < limit:
        raise InvalidRequestError(
            "truncate_prompt_tokens", f"must be -1 or in [1, max_model_len - 1 = {limit - 1}], got {kept}"
        )
    return kept if kept > 0 else max(1, limit - max(1, num_output))


def _asked_output(
    body: types.GenerationBody, num_top: int | None, *, echo: bool = False, only_prompt: bool = False
) -> OutputOptions:
    """Return the output options. `only_prompt`: no token is generated."""
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


def _check_prompt_logprobs(
    prompts: Sequence[PreparedPrompt], body: types.GenerationBody, params: SamplingParams
) -> None:
    """Check the number of log-probabilities of prompts, over all choices. Raises `InvalidRequestError`."""
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    asked = num_tokens * (body.n or 1) * (params.prompt_logprobs + 1)
    if asked > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
            f"at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts in a request, got {asked}: "
            f"{params.prompt_logprobs} and the token's own for {num_tokens} tokens times n={body.n or 1}",
        )


def _max_tokens(
    params: SamplingParams,
    asked: int | None,
    default: int | None,
    num_prompt: int,
    field: str,
    model: ServedModel,
) -> int:
    """Return `max_tokens`. A requested value that does not fit is an error; a default is reduced."""
    room = model.max_model_len - num_prompt
    if asked is None:
        asked = room if default is None else min(default, room)
    if asked < 1:
        raise InvalidRequestError(field, f"must be at least 1, got {asked}")
    if asked > room:
        limit = f"the model's maximum context length is {model.max_model_len} tokens"
        raise too_long(field, f"{limit}; {num_prompt} are in the prompt and {asked} were asked for")
    asked = min(asked, model.defaults.max_new_tokens or asked)
    if params.min_tokens > asked:
        raise InvalidRequestError(
            "min_tokens", f"must be in [0, max_tokens={asked}], got {params.min_tokens}"
        )
    return asked
