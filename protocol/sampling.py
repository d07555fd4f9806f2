"""Sampling parameters in the engine's form: with defaults, a seed, and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import msgspec

from protocol.errors import InvalidRequestError
from protocol.outputs import FinishReason

MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY = 1e-3
"""The smallest penalty: below it a logit divided by the penalty may exceed what float32 can hold."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one sequence.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 mean no filter. `seed` keys the noise together
    with the token's position, so that it alone fixes the answer. `logprobs` counts the alternatives wanted
    with each token (0: only the chosen token's own); None wants none. `banned_token_sequences` are never
    completed. The tokens spell a text of `grammar`, in llguidance's notation, and the sequence ends where
    that text is complete. `embeds`: the prompt's embedding is wanted, with one token.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    banned_token_sequences: list[list[int]] = []
    allowed_token_ids: list[int] | None = None
    grammar: str | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embeds: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def end(
        self, token_id: int, num_tokens: int, eos: Collection[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Return why an answer of `num_tokens` tokens ends with `token_id`, and the stop token that ends it;
        None if it does not end.
        """
        if token_id in self.stop_token_ids:
            return "stop", token_id
        if token_id in eos and not self.ignore_eos:
            return "stop", None
        return ("length", None) if num_tokens >= self.max_tokens else (None, None)


def check_sampling_params(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raise `InvalidRequestError`, naming the field and its limit, when a value is out of range."""
    ranges: dict[str, tuple[float, float]] = {
        "temperature": (0, 100),
        "top_k": (-1, MAX_TOP_K),
        "min_p": (0, 1),
        "repetition_penalty": (MIN_REPETITION_PENALTY, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (-(2**63), MAX_SEED),
        "logprobs": (0, max_logprobs),
        "prompt_logprobs": (0, max_logprobs),
    }
    for field, (low, high) in ranges.items():
        value = getattr(params, field)
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(field, f"must be in [{low}, {high}], got {value}")
    if not 0 < params.top_p <= 1:
        raise InvalidRequestError("top_p", f"must be in (0, 1], got {params.top_p}")
    if params.max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        limits = f"[0, max_tokens={params.max_tokens}]"
        raise InvalidRequestError("min_tokens", f"must be in {limits}, got {params.min_tokens}")
    check_grammar(params)
    _check_token_ids(params, vocab_size)


def check_grammar(params: SamplingParams) -> None:
    """Raise `InvalidRequestError` where it is too large, or other parameters contradict it."""
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
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    for bias in params.logit_bias.values():
        if not -100 <= bias <= 100:
            raise InvalidRequestError("logit_bias", f"values must be in [-100, 100], got {bias}")
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
