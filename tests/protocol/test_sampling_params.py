"""Every sampling parameter out of range is refused by name."""

import math

import pytest

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, check_sampling_params

VOCAB_SIZE = 100
MAX_LOGPROBS = 20


def check(**params) -> None:
    check_sampling_params(SamplingParams(**{"max_tokens": 16, **params}), VOCAB_SIZE, MAX_LOGPROBS)


BAD = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 100.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": -1.0}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": -0.01}),
    ("min_p", {"min_p": 1.01}),
    ("min_p", {"min_p": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": -1.0}),
    ("repetition_penalty", {"repetition_penalty": 101.0}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("presence_penalty", {"presence_penalty": math.nan}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -math.inf}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 17}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}),
    ("logit_bias", {"logit_bias": {1: 100.5}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [VOCAB_SIZE]}),
    ("bad_words", {"banned_token_sequences": [[]]}),
    ("bad_words", {"banned_token_sequences": [[1], [2, VOCAB_SIZE]]}),
    ("logprobs", {"logprobs": MAX_LOGPROBS + 1}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": MAX_LOGPROBS + 1}),
]


@pytest.mark.parametrize(("field", "params"), BAD, ids=[f"{field}-{i}" for i, (field, _) in enumerate(BAD)])
def test_out_of_range_is_refused_by_name(field, params):
    with pytest.raises(InvalidRequestError) as caught:
        check(**params)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**6},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-3},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"min_tokens": 16},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop_token_ids": [0, VOCAB_SIZE - 1]},
    {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
    {"allowed_token_ids": [5]},
    {"banned_token_sequences": [[1, 2], [3]]},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
]


@pytest.mark.parametrize("params", GOOD)
def test_the_limits_themselves_are_accepted(params):
    check(**params)


def test_messages_name_the_limit():
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 100\], got -1"):
        check(temperature=-1.0)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, max_tokens=16\], got 20"):
        check(min_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 20\], got 21"):
        check(logprobs=21)
