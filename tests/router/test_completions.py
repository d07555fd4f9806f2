"""`/v1/completions` through a real server and the `openai` client."""

from __future__ import annotations

import pytest

from router.preprocessing.requests import derived_seed
from tests.router.router_clients import eventually

PROMPT = "the quick brown fox"


@pytest.fixture
def complete(client):
    def call(prompt=PROMPT, **options):
        return client.completions.create(model="test-model", prompt=prompt, **options)

    return call


def repeated(tokenizer, text: str, count: int) -> list[int]:
    """Return the fake workers' answer."""
    token_ids = tokenizer.encode(text)
    return (token_ids * (count // len(token_ids) + 1))[:count]


def test_text_and_usage(complete, tokenizer):
    answer = complete(max_tokens=4)
    token_ids = tokenizer.encode(PROMPT)
    choice = answer.choices[0]
    assert choice.text == tokenizer.decode(repeated(tokenizer, PROMPT, 4))
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert (answer.object, answer.model) == ("text_completion", "test-model")
    assert answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(token_ids), 4)
    assert answer.usage.total_tokens == len(token_ids) + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


def test_default_max_tokens_is_16_or_what_fits(complete):
    assert complete().usage.completion_tokens == 16
    assert complete([7] * 505).usage.completion_tokens == 512 - 505


def test_stream_equals_whole(complete):
    options = {"prompt": "naïve 🙂 日本語 text", "max_tokens": 60}
    whole = complete(**options).choices[0]
    chunks = list(complete(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert "\ufffd" not in "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 10
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "text_completion")}
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_usage(complete):
    *chunks, last = complete(max_tokens=5, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.completion_tokens, last.usage.total_tokens) == (5, last.usage.prompt_tokens + 5)
    assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(max_tokens=5, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one text", 1), (["a text", "another one"], 2), ([5, 6, 7], 1), ([[5, 6], [7, 8, 9]], 2)],
)
def test_prompt_kinds_and_n(complete, tokenizer, prompt, count, stream):
    answer = complete(prompt, n=3, max_tokens=6, stream=stream)
    texts: dict[int, str] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    expected = []
    for one in prompts:
        token_ids = tokenizer.encode(one) if isinstance(one, str) else one
        expected += [tokenizer.decode((token_ids * 6)[:6])] * 3
    assert [texts[index] for index in range(3 * count)] == expected
    if not stream:
        assert answer.usage.completion_tokens == 3 * count * 6
        assert answer.usage.prompt_tokens == sum(
            len(tokenizer.encode(one) if isinstance(one, str) else one) for one in prompts
        )


def test_seeds(complete, router):
    worker = next(worker for worker in router.workers if worker.role == "prefill")

    def seeds_of(**options) -> list[int]:
        worker.generated.clear()
        complete(max_tokens=1, **options)
        return [request.sampling.seed for request in worker.generated]

    assert seeds_of(seed=42, n=3) == [42, derived_seed(42, 1), derived_seed(42, 2)]
    assert seeds_of(prompt=["a", "b"], seed=42, n=2) == [42, derived_seed(42, 1)] * 2
    assert seeds_of(seed=-1) == [-1]
    first, second = seeds_of() + seeds_of()
    assert first != second


def test_the_deployments_seed_is_that_of_requests_without_one(make_router):
    router = make_router(seed=7)
    worker = router.add_worker()
    for asked in ({"n": 2}, {"seed": 42}):
        body = {"prompt": "the quick brown fox", "max_tokens": 1, **asked}
        assert router.http.post("/v1/completions", json=body).status_code == 200
    assert [request.sampling.seed for request in worker.generated] == [7, derived_seed(7, 1), 42]


def test_sampling_parameters_arrive(complete, router):
    worker = next(worker for worker in router.workers if worker.role == "prefill")
    worker.generated.clear()
    openais = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": -0.2}
    vllms = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [3]}
    vllms |= {"ignore_eos": True, "allowed_token_ids": [5, 6]}
    more = {"bad_words": ["fox"], "priority": -3, "cache_salt": "tenant"}
    complete(max_tokens=3, **openais, logit_bias={"7": -100}, extra_body=vllms | more)
    request = worker.generated[0]
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in openais | vllms} == openais | vllms
    assert (sampling.max_tokens, sampling.logit_bias) == (3, {7: -100.0})
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    assert len(sampling.banned_token_sequences) in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(complete, tokenizer, router, stream, include):
    text = tokenizer.decode(repeated(tokenizer, PROMPT, 40))
    stop = "wn foxthe qu"
    decode = next(worker for worker in router.workers if worker.role == "decode")
    before = len({*decode.aborted})
    answer = complete(
        max_tokens=40, stop=[stop, "never"], stream=stream, extra_body={"include_stop_str_in_output": include}
    )
    parts = list(answer) if stream else [answer]
    end = text.index(stop) + (len(stop) if include else 0)
    assert "".join(part.choices[0].text for part in parts) == text[:end]
    assert parts[-1].choices[0].finish_reason == "stop"
    assert parts[-1].choices[0].stop_reason == stop
    if not stream:
        used = repeated(tokenizer, PROMPT, answer.usage.completion_tokens)
        assert stop in tokenizer.decode(used)
        assert stop not in tokenizer.decode(used[:-1])
    # The worker reports once more the output that it had sent before it heard of the abort.
    eventually(lambda: len({*decode.aborted}) == before + 1)


def test_min_tokens_lets_early_stops_pass(complete, tokenizer):
    answer = complete(max_tokens=40, stop="fox", extra_body={"min_tokens": len(tokenizer.encode(PROMPT))})
    assert answer.choices[0].text.count("fox") == 1
    assert answer.choices[0].finish_reason == "stop"


def test_stop_token_ids_have_no_text(make_router):
    router = make_router()
    router.add_worker(script=lambda request: [10, 11, 12], finish_reason="stop")
    tokenizer = router.server.state.tokenizer
    body = {"prompt": "x", "max_tokens": 9, "stop_token_ids": [12]}
    answer = router.http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer.decode([10, 11])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 12)
    assert answer["usage"]["completion_tokens"] == 3
    shown = router.http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()
    assert shown["choices"][0]["text"] == tokenizer.decode([10, 11, 12])


def test_logprobs(complete, tokenizer):
    answer = complete(max_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    token_ids = repeated(tokenizer, PROMPT, 5)
    assert logprobs.tokens == [tokenizer.decode([token_id]) for token_id in token_ids]
    assert logprobs.token_logprobs == pytest.approx([-0.5 - i / 1000 for i in range(5)])
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    text = answer.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset:].startswith(token)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(complete, tokenizer, max_tokens):
    answer = complete(max_tokens=max_tokens, echo=True, logprobs=1)
    choice, prompt_ids = answer.choices[0], tokenizer.encode(PROMPT)
    answered = repeated(tokenizer, PROMPT, max_tokens) if max_tokens else []
    assert choice.text == PROMPT + tokenizer.decode(answered)
    assert choice.logprobs.tokens == [tokenizer.decode([token_id]) for token_id in prompt_ids + answered]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert answer.usage.completion_tokens == max_tokens


def offsets_fit(choice) -> bool:
    """Tell whether each token is found in the text at its offset."""
    told = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    return all(choice.text[offset:].startswith(token) for token, offset in told)


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_a_prompt_with_special_tokens(complete, tokenizer, skips):
    prompt = f"{PROMPT}<|end|> b  c<|pad|>  "
    extra = {"skip_special_tokens": skips}
    answer = complete(prompt, max_tokens=2, echo=True, logprobs=1, extra_body=extra)
    assert answer.choices[0].text.startswith(prompt)
    assert offsets_fit(answer.choices[0])
    token_ids = tokenizer.encode(prompt)
    answer = complete(token_ids, max_tokens=2, echo=True, logprobs=1, extra_body=extra)
    choice = answer.choices[0]
    assert choice.text == tokenizer.decode(token_ids + token_ids[:2], skips)
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert offsets_fit(choice) is not skips


def test_echo_of_tokens_that_end_within_a_character(complete, tokenizer):
    token_ids = tokenizer.encode("x 日")
    assert tokenizer.decode(token_ids[:-1]).endswith("\ufffd")
    prompt = [*token_ids[-1:], *token_ids[:-1]]  # the worker repeats from the prompt's first token
    answer = complete(prompt, max_tokens=1, echo=True, logprobs=1)
    assert answer.choices[0].text.endswith("x 日")


def test_offsets_in_a_stream_that_begins_with_the_prompt(complete):
    prompt = f"{PROMPT}<|end|>!"
    text, tokens, offsets = "", [], []
    for chunk in complete(prompt, max_tokens=3, echo=True, logprobs=0, stream=True):
        text += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens
        offsets += chunk.choices[0].logprobs.text_offset
    assert len(tokens) > 4
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))


def test_logprobs_of_half_characters(complete):
    """Tokens that are no text on their own are named by their bytes, so that names don't collide."""
    logprobs = complete("\U0001f6f0", max_tokens=4, logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xf0\\x9f", "bytes:\\x9b", "bytes:\\xb0", "bytes:\\xf0\\x9f"]


def test_prompt_logprobs_and_token_ids(complete, tokenizer):
    answer = complete(max_tokens=2, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    choice = answer.choices[0]
    prompt_ids = tokenizer.encode(PROMPT)
    assert choice.prompt_token_ids == prompt_ids
    assert choice.token_ids == repeated(tokenizer, PROMPT, 2)
    assert choice.prompt_logprobs[0] is None
    assert len(choice.prompt_logprobs) == len(prompt_ids)
    entry = choice.prompt_logprobs[1][str(prompt_ids[1])]
    assert entry["rank"] == 1
    assert entry["decoded_token"] == tokenizer.decode([prompt_ids[1]])


@pytest.mark.parametrize("kept", [3, 40, -1])
@pytest.mark.parametrize("as_text", [False, True])
def test_truncated_prompts(complete, tokenizer, kept, as_text):
    text = "the quick brown fox jumps"
    token_ids = tokenizer.encode(text)
    prompt = text if as_text else token_ids
    answer = complete(prompt, max_tokens=2, echo=True, extra_body={"truncate_prompt_tokens": kept})
    left = token_ids[-kept:] if kept == 3 else token_ids
    assert answer.usage.prompt_tokens == len(left)
    assert answer.choices[0].text.startswith(tokenizer.decode(left))


def test_a_prompt_beyond_the_context_is_truncated_to_leave_room(complete):
    for prompt in ("a b " * 5000, [5] * 20_000):
        usage = complete(prompt, max_tokens=12, extra_body={"truncate_prompt_tokens": -1}).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (500, 12)
