"""Sampling parameters in the engine's form: checked, with defaults and a seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from math import inf
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from protocol.errors import InvalidRequestError
from protocol.outputs import FinishReason

MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY = 1e-3
"""Smallest penalty: a logit divided by a smaller one may exceed float32."""


class SamplingField(NamedTuple):
    """A sampling field that requests may set under its own name: its description, and its limits.

    `is_open`: the value must be greater than `low`. `max_length` limits lists and mappings.
    """

    doc: str
    low: float = -inf
    high: float = inf
    is_open: bool = False
    max_length: int | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise `InvalidRequestError` if the value is out of range."""
        if self.max_length is not None and len(value) > self.max_length:
            raise InvalidRequestError(field, f"at most {self.max_length} entries, got {len(value)}")
        numbers = value.values() if isinstance(value, dict) else (value,)
        for number in numbers if self.high < inf else ():
            if not self.low <= number <= self.high or (self.is_open and number == self.low):
                limits = f"{'(' if self.is_open else '['}{self.low}, {self.high}]"
                raise InvalidRequestError(field, f"must be in {limits}, got {number}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one sequence.

    Each `SamplingField` defines a field of request bodies, of the model's defaults and of `/openapi.json`,
    and its checks in router and workers.

    `logprobs` is the number of alternatives to report with each token (0: only the chosen token); None
    reports no log-probabilities. `banned_token_sequences` are never completed. With a `grammar`, in
    llguidance's notation, the tokens spell a text that matches it, and the sequence ends when the text is
    complete. `embeds` asks for the prompt's embedding, with one token.
    """

    max_tokens: int
    seed: Annotated[
        int, SamplingField("Equal requests with equal seeds get equal answers.", -(2**63), MAX_SEED)
    ] = 0
    """Key of the noise, together with the token's position, so that the seed alone fixes the answer."""
    temperature: Annotated[
        float, SamplingField("0 (greedy) to 100; default: the model's, else 1.", 0, 100)
    ] = 1.0
    top_k: Annotated[
        int, SamplingField("Sample from this many of the likeliest; 0 or -1: from all.", -1, MAX_TOP_K)
    ] = 0
    top_p: Annotated[
        float, SamplingField("Above 0, up to 1: sample from the likeliest with this sum.", 0, 1, is_open=True)
    ] = 1.0
    min_p: Annotated[
        float, SamplingField("0 to 1: least probability, relative to the likeliest token's.", 0, 1)
    ] = 0.0
    repetition_penalty: Annotated[
        float, SamplingField("0.001 to 100; above 1 discourages repetition.", MIN_REPETITION_PENALTY, 100)
    ] = 1.0
    presence_penalty: Annotated[float, SamplingField("-2 to 2, for each token that occurred.", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, SamplingField("-2 to 2, for each occurrence.", -2, 2)] = 0.0
    logit_bias: Annotated[
        dict[int, float],
        SamplingField("Token id to a bias from -100 to 100.", -100, 100, max_length=MAX_LOGIT_BIAS),
    ] = {}
    banned_token_sequences: list[list[int]] = []
    allowed_token_ids: list[int] | None = None
    grammar: str | None = None
    min_tokens: Annotated[int, SamplingField("Generate at least this many tokens.")] = 0
    stop_token_ids: Annotated[
        list[int], SamplingField("Tokens that end the answer.", max_length=MAX_STOP_TOKEN_IDS)
    ] = []
    ignore_eos: Annotated[bool, SamplingField("Go on after the end-of-sequence token.")] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embeds: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def end(
        self, token_id: int, num_tokens: int, eos: Collection[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Return why an answer of `num_tokens` tokens ends with `token_id`, and the matching stop token."""
        if token_id in self.stop_token_ids:
            return "stop", token_id
        if token_id in eos and not self.ignore_eos:
            return "stop", None
        return ("length", None) if num_tokens >= self.max_tokens else (None, None)


def _asked_fields() -> Iterator[tuple[str, Any, SamplingField]]:
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        for asked in getattr(hint, "__metadata__", ()):
            yield name, hint.__origin__, asked


SAMPLING_FIELDS = {name: (kind, asked) for name, kind, asked in _asked_fields()}
"""The types and limits of the fields that requests may set under their own names."""
MODELS_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields whose default the model's `generation_config.json` may set."""
ECHOED = ("temperature", "top_p")
"""Fields that answers of `/v1/responses` repeat."""


def body_fields() -> list[tuple[str, Any, None]]:
    """Return the fields of a request's body, as `msgspec.defstruct` takes them; None: not given."""
    fields: list[tuple[str, Any, None]] = []
    for name, (kind, asked) in SAMPLING_FIELDS.items():
        limit = asked.max_length
        some = kind if limit is None else Annotated[kind, msgspec.Meta(max_length=limit)]
        fields.append((name, Annotated[some | None, msgspec.Meta(description=asked.doc)], None))
    return fields


def check_sampling_params(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raise `InvalidRequestError` that names the field and its limit if a value is out of range."""
    for name, (_, asked) in SAMPLING_FIELDS.items():
        asked.check(name, getattr(params, name))
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and not 0 <= value <= max_logprobs:
            raise InvalidRequestError(name, f"must be in [0, {max_logprobs}], got {value}")
    if params.max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        limits = f"[0, max_tokens={params.max_tokens}]"
        raise InvalidRequestError("min_tokens", f"must be in {limits}, got {params.min_tokens}")
    check_grammar(params)
    _check_token_ids(params, vocab_size)


def check_grammar(params: SamplingParams) -> None:
    """Raise `InvalidRequestError` if the grammar is too large, or other parameters contradict it."""
    if params.grammar is None:
        return
    size = len(params.grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError("grammar", f"at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
    for field, is_given in (("min_tokens", params.min_tokens > 0), ("ignore_eos", params.ignore_eos)):
        if is_given:
            reason = "cannot be combined with a structured output, which ends where it is complete"
            raise InvalidRequestError(field, reason)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    if params.allowed_token_ids == []:
        raise InvalidRequestError("allowed_token_ids", "must not be empty")
    if [] in params.banned_token_sequences:
        raise InvalidRequestError("bad_words", "must not hold an empty sequence")
    token_ids: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": chain.from_iterable(params.banned_token_sequences),
    }
    for field, ids in token_ids.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                reason = f"token ids must be in [0, {vocab_size - 1}], got {token_id}"
                raise InvalidRequestError(field, reason)
