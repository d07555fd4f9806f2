"""Every sampling parameter out of range is refused by name."""

import math
from typing import Any

import pytest

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, check_sampling_params

VOCAB_SIZE = 100
MAX_LOGPROBS = 20


def check(**params) -> None:
    check_sampling_params(SamplingParams(**{"max_tokens": 16, **params}), VOCAB_SIZE, MAX_LOGPROBS)


BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, math.nan, math.inf],
    "top_p": [0.0, 1.01, -1.0, math.nan],
    "top_k": [-2],
    "min_p": [-0.01, 1.01, math.nan],
    "repetition_penalty": [0.0, -1.0, 101.0, math.nan],
    "presence_penalty": [2.1, -2.1, math.nan],
    "frequency_penalty": [2.1, -math.inf],
    "max_tokens": [0, -5],
    "min_tokens": [-1, 17],
    "seed": [2**63, -(2**63) - 1],
    "stop_token_ids": [[VOCAB_SIZE], [-1], [1] * (MAX_STOP_TOKEN_IDS + 1)],
    "logit_bias": [
        *({1: 100.5}, {1: math.nan}, {-1: 1.0}, {VOCAB_SIZE: 1.0}),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
    ],
    "allowed_token_ids": [[], [VOCAB_SIZE]],
    "banned_token_sequences": [[[]], [[1], [2, VOCAB_SIZE]]],
    "logprobs": [MAX_LOGPROBS + 1, -1],
    "prompt_logprobs": [MAX_LOGPROBS + 1],
}


@pytest.mark.parametrize("name", BAD)
def test_out_of_range_is_refused_by_name(name):
    field = "bad_words" if name == "banned_token_sequences" else name
    for value in BAD[name]:
        with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
            check(**{name: value})
        assert caught.value.field == field


GOOD: dict[str, list[Any]] = {
    "temperature": [0.0, 100.0],
    "top_p": [1.0, 1e-9],
    "top_k": [-1, 0, 10**6],
    "min_p": [1.0],
    "repetition_penalty": [1e-3],
    "presence_penalty": [-2.0],
    "frequency_penalty": [2.0],
    "min_tokens": [16],
    "seed": [-(2**63), 2**63 - 1],
    "stop_token_ids": [[0, VOCAB_SIZE - 1]],
    "logit_bias": [{0: -100.0, VOCAB_SIZE - 1: 100.0}],
    "allowed_token_ids": [[5]],
    "banned_token_sequences": [[[1, 2], [3]]],
    "logprobs": [0],
    "prompt_logprobs": [MAX_LOGPROBS],
}


@pytest.mark.parametrize("name", GOOD)
def test_the_limits_themselves_are_accepted(name):
    check()
    for value in GOOD[name]:
        check(**{name: value})


def test_messages_name_the_limit():
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 100\], got -1"):
        check(temperature=-1.0)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, max_tokens=16\], got 20"):
        check(min_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 20\], got 21"):
        check(logprobs=21)
