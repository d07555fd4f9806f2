"""From a request body to prompts and sampling parameters, with every limit checked."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_SEED, SEED_RANGE, SamplingParams, check_sampling_params
from protocol.speculation import RequestSpeculation, check_request_speculation, parse_request_speculation
from router.choice import Prompt, TextOptions
from router.errors import ApiError
from router.openai_types import GenerationBody
from router.registry import ModelFacts
from router.tokenizer import Tokenizer

V = TypeVar("V")

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_CACHE_SALT = 256


def check_model(config: ServeConfig, name: str | None) -> None:
    """Raises `ApiError` 404 for a model that isn't served."""
    if name is not None and name != config.model_name:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {config.model_name!r}",
            param="model",
            code="model_not_found",
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidRequestError(field, f"token ids must be in [0, {vocab_size - 1}]")


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


def num_choices(body: GenerationBody, num_prompts: int, config: ServeConfig) -> int:
    n = 1 if body.n is None else body.n
    if n < 1:
        raise InvalidRequestError("n", f"must be at least 1, got {n}")
    if n * num_prompts > config.max_n:
        raise InvalidRequestError(
            "n" if num_prompts == 1 else "prompt",
            f"{num_prompts} prompts times n={n} exceed the limit of {config.max_n} sequences (--max-n)",
        )
    return n


def room_for_tokens(
    asked: int | None, default: int | None, prompt: Prompt, field: str, model: ModelFacts
) -> int:
    """How many tokens may be generated. Asking for more than fits is an error, a default is cut to fit."""
    room = model.max_model_len - len(prompt.token_ids)
    if asked is None:
        return room if default is None else min(default, room)
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
    return asked


def text_options(body: GenerationBody) -> TextOptions:
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError("stop", f"at most {MAX_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError("stop", f"each must have 1 to {MAX_STOP_CHARACTERS} characters")
    return TextOptions(
        stop=tuple(dict.fromkeys(stops)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def sampling_params(
    body: GenerationBody,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    tokenizer: Tokenizer,
    model: ModelFacts,
    config: ServeConfig,
) -> SamplingParams:
    """All but `max_tokens` and the seeds of further choices. Raises `InvalidRequestError`."""
    if body.seed is not None and not -(2**63) <= body.seed <= MAX_SEED:
        raise InvalidRequestError("seed", f"must be {SEED_RANGE}, got {body.seed}")
    params = SamplingParams(
        max_tokens=model.max_model_len,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        temperature=_or(body.temperature, 1.0),
        top_k=_or(body.top_k, 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or {},
        banned_token_sequences=_bad_words(body.bad_words or [], tokenizer),
        allowed_token_ids=body.allowed_token_ids,
        min_tokens=_or(body.min_tokens, 0),
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    check_sampling_params(params, model.vocab_size, config.max_logprobs)
    return params


def with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(
            "min_tokens", f"must be in [0, max_tokens={max_tokens}], got {params.min_tokens}"
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Choice 0 has the request's seed, each further one a seed derived from it."""
    if index == 0:
        return params
    return msgspec.structs.replace(params, seed=derived_seed(params.seed, index))


def derived_seed(seed: int, index: int) -> int:
    """Deterministic and well spread; in [0, 2**63)."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8, person=b"tandem-choice").digest()
    return int.from_bytes(digest, "little") >> 1


def scheduling(body: GenerationBody) -> tuple[int, str]:
    """Priority and cache salt, checked."""
    priority, salt = body.priority or 0, body.cache_salt or ""
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequestError("priority", f"must be in [-2**31, 2**31), got {priority}")
    if len(salt) > MAX_CACHE_SALT:
        raise InvalidRequestError("cache_salt", f"at most {MAX_CACHE_SALT} characters, got {len(salt)}")
    return priority, salt


def speculation(body: GenerationBody, config: ServeConfig) -> RequestSpeculation | None:
    """What the request says of its own speculation, if the deployment can do that."""
    asked = parse_request_speculation(body.speculative)
    check_request_speculation(asked, config.speculative_config)
    return asked


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as spelled on its own and, where that is another token, after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError("bad_words", f"at most {MAX_BAD_WORDS} words, got {len(words)}")
    sequences = []
    for word in words:
        stripped = word.lstrip(" ")
        if not stripped or len(word) > MAX_STOP_CHARACTERS:
            raise InvalidRequestError("bad_words", f"each must have 1 to {MAX_STOP_CHARACTERS} characters")
        bare = tokenizer.encode(stripped, add_special_tokens=False)
        spaced = tokenizer.encode(" " + stripped, add_special_tokens=False)
        sequences.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    return sequences


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
