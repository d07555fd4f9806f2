"""A server that speculates gives the tokens of a server that does not, for each method, alone and in a batch.
fp32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app as tandem
from deploy.config import load_config, speculative_config
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.speculation import WEIGHTLESS
from tests.e2e.serving import PAIR, HttpServing

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft_model_tree": {"method": "draft_model", "num_speculative_tokens": 12, "tree": True},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "self_speculative": {"method": "self_speculative", "skip_layers": [2], "num_speculative_tokens": 4},
}
WORKERS = {"disaggregated": PAIR, "colocated": {"decode-0": ""}}
SERVERS = [
    ("draft_model", "disaggregated"),
    ("draft_model_tree", "colocated"),
    ("medusa", "disaggregated"),
    ("eagle", "disaggregated"),
    ("self_speculative", "disaggregated"),
]
"""Each method with weights in one deployment. Requests to two of them choose those without."""


def on(*methods: str) -> pytest.MarkDecorator:
    """Use the servers of these methods alone."""
    servers = [server for server in SERVERS if server[0] in methods]
    return pytest.mark.parametrize("serving", servers, indirect=True, ids="-".join)


NUM_TOKENS = 40
LINES = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()
PROMPT = json.loads(LINES[20])["prompt"][-700:]
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
BAN = {"bad_words": ["self"], "logit_bias": {"10": -5}, "min_tokens": 8}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "seeded": {"temperature": 0.7, "seed": 11, "top_p": 0.95},
    "n": {"temperature": 0.5, "seed": 5, "n": 3, "logprobs": 0},
    "penalties": {"temperature": 0, "logprobs": 1, **PENALTIES},
    "bans": {"temperature": 0.3, "seed": 2, **BAN},
    "stop": {"temperature": 0, "stop": ["=3)", "return self"], "logprobs": 0},
    "kept stop": {"temperature": 0, "stop": ["level=2)"], "include_stop_str_in_output": True},
    "stop token": {"temperature": 0, "stop_token_ids": [384], "logprobs": 0},
    "end of text": {"temperature": 1.0, "seed": 9, "ignore_eos": False, "logit_bias": {"0": 9}},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2},
}

NOT_SPECULATING = ("logprobs", "seeded", "n", "penalties")

Choices = list[dict[str, Any]]
Ask = Callable[..., Choices]


def options(deployment: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024, "compile": "auto"}
    if deployment is not None:
        fields = DEPLOYMENTS[deployment]
        config["speculative_config"] = speculative_config(fields, "--speculative-config", str(BUNDLED_MODEL))
    return config


def serve(deployment: str | None, workers: str) -> HttpServing:
    disaggregation = workers == "disaggregated"
    return HttpServing(BUNDLED_MODEL, WORKERS[workers], disaggregation=disaggregation, **options(deployment))


def body_of(request: dict[str, Any], **fields: Any) -> dict[str, Any]:
    defaults = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return defaults | request | fields


def ask(serving: HttpServing, request: dict[str, Any], **fields: Any) -> Choices:
    """Return the choices of a whole answer, without fields that depend on speculation."""
    answer = serving.http.post("/v1/completions", json=body_of(request, **fields))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    total = sum(len(choice["token_ids"]) for choice in choices)
    assert answer.json()["usage"]["completion_tokens"] == total
    return [comparable([choice]) for choice in choices]


def ask_at_once(serving: HttpServing, asked: list[tuple[str, dict[str, Any]]], how: Ask) -> list[Choices]:
    """Return the answers to requests that are sent at once. Each is a request's name and additional
    fields.
    """
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(lambda each: how(serving, REQUESTS[each[0]], **each[1]), asked))


def ask_streaming(serving: HttpServing, request: dict[str, Any], **fields: Any) -> Choices:
    """Return the choices of a streamed answer, put together from its events."""
    body = body_of(request, stream_options={"include_usage": True}, **fields)
    parts: dict[int, list[dict[str, Any]]] = {}
    events = serving.events("/v1/completions", body)
    for choice in (choice for event in events for choice in event["choices"]):
        parts.setdefault(choice["index"], []).append(choice)
    choices = [comparable(parts[index]) for index in sorted(parts)]
    total = sum(len(choice["token_ids"]) for choice in choices)
    assert events[-1]["usage"]["completion_tokens"] == total
    return choices


def comparable(parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    return {
        "text": "".join(part["text"] for part in parts),
        "token_ids": [token for part in parts for token in part["token_ids"]],
        "reasons": (parts[-1]["finish_reason"], parts[-1]["stop_reason"]),
        "tokens": [token for entry in logprobs for token in entry["tokens"]],
        "offsets": [offset for entry in logprobs for offset in entry["text_offset"]],
        "logprobs": [value for entry in logprobs for value in entry["token_logprobs"]],
        "tops": [top for entry in logprobs for top in entry["top_logprobs"]],
    }


def assert_same(choices: Choices, expected: Choices, name: str = "") -> None:
    assert len(choices) == len(expected)
    for choice, wanted in zip(choices, expected, strict=True):
        for field in ("token_ids", "text", "reasons", "tokens", "offsets"):
            assert choice[field] == wanted[field], f"{name} {field}"
        assert choice["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
        for top, wanted_top in zip(choice["tops"], wanted["tops"], strict=True):
            assert sorted(top or ()) == sorted(wanted_top or ())


@pytest.fixture(scope="module")
def expected() -> dict[str, Choices]:
    """Return the answers of a server without speculation."""
    with serve(None, "colocated") as serving:
        return {name: ask(serving, request) for name, request in REQUESTS.items()}


@pytest.fixture(scope="module", params=SERVERS, ids=lambda param: "-".join(param))
def serving(request: pytest.FixtureRequest) -> Iterator[HttpServing]:
    with serve(*request.param) as serving:
        yield serving


def method_of(serving: HttpServing) -> str:
    assert serving.config.speculative_config is not None
    return serving.config.speculative_config.method


def total(serving: HttpServing, name: str) -> float:
    return serving.metric(f"tandem_spec_decode_num_{name}_total", method=method_of(serving))


def test_the_requests_differ_and_end_in_every_way(expected: dict[str, Choices]) -> None:
    """Otherwise the comparisons would prove little."""
    reasons = {name: choices[0]["reasons"] for name, choices in expected.items()}
    assert reasons["greedy"] == ("length", None)
    assert (reasons["stop"], reasons["kept stop"]) == (("stop", "return self"), ("stop", "level=2)"))
    assert reasons["stop token"] == ("stop", 384)
    assert reasons["end of text"] == ("stop", None)
    assert len({tuple(choice["token_ids"]) for choice in expected["n"]}) == 3
    for name in ("stop", "stop token", "end of text"):
        assert 3 < len(expected[name][0]["token_ids"]) < NUM_TOKENS, name


def test_answers_equal_those_without_speculation(serving: HttpServing, expected: dict[str, Choices]) -> None:
    """Runs requests alone, then all at once beside requests without speculation. One server gives all answers
    streamed and whole; the others give some of them in the next test.
    """
    assert_same(ask_streaming(serving, REQUESTS["logprobs"]), expected["logprobs"], "alone")
    plain = [(name, {"speculative": {"enabled": False}}) for name in NOT_SPECULATING]
    asked = [*((name, {}) for name in REQUESTS), *plain]
    for how in (ask_streaming, ask) if method_of(serving) == "medusa" else (ask_streaming,):
        for (name, wish), choices in zip(asked, ask_at_once(serving, asked, how), strict=True):
            assert_same(choices, expected[name], f"{how.__name__} {name} {wish}")
    serving.wait_empty()


def test_a_server_that_configures_nothing_gives_the_same_answers(expected: dict[str, Choices]) -> None:
    given = load_config({"model": str(BUNDLED_MODEL), "device": "cpu"}, environ={}).speculative_config
    fields = {"temperature": 0, "structured_outputs": {"regex": "(ab|cd){12,16}"}}
    with HttpServing(BUNDLED_MODEL, PAIR, speculative_config=given, **options(None)) as serving:
        for choices, name in zip(
            ask_at_once(serving, [(each, {}) for each in REQUESTS], ask), REQUESTS, strict=True
        ):
            assert_same(choices, expected[name], name)
        drafted = ask(serving, fields, ignore_eos=False)
        assert_same(drafted, ask(serving, fields, ignore_eos=False, speculative={"enabled": False}))
        told = {each["start_up"]["speculation"] for each in serving.worker_states().values()}
        assert told == {"suffix (deterministic True)"}
        assert total(serving, "drafts") > 0
        serving.wait_empty()


@on("draft_model", "medusa")
def test_requests_choose_their_own_speculation(serving: HttpServing, expected: dict[str, Choices]) -> None:
    wishes: list[dict[str, Any]] = [
        *({"num_speculative_tokens": count} for count in (0, 1, 3, 8)),
        *({"method": method} for method in sorted({method_of(serving), *WEIGHTLESS})),
    ]
    asked = [("logprobs", {"speculative": wish}) for wish in wishes]
    for wish, choices in zip(wishes, ask_at_once(serving, asked, ask), strict=True):
        assert_same(choices, expected["logprobs"], str(wish))
    not_deployed = "eagle" if method_of(serving) == "medusa" else "medusa"
    refused = serving.http.post(
        "/v1/completions", json=body_of(REQUESTS["greedy"], speculative={"method": not_deployed})
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "speculative.method"


@on("draft_model")
def test_answers_and_metrics_agree(serving: HttpServing) -> None:
    """The drafts that answers report equal the counts of `/metrics` and `tandem status`."""

    def counted() -> tuple[float, float, float]:
        return total(serving, "drafts"), total(serving, "draft_tokens"), total(serving, "accepted_tokens")

    serving.wait_empty()
    before = counted()
    body = body_of(REQUESTS["greedy"], return_timing=True)
    (choice,) = serving.http.post("/v1/completions", json=body).json()["timing"]["choices"]
    accepted, rejected = choice["accepted_tokens"], choice["drafted_tokens"] - choice["accepted_tokens"]
    assert accepted > 0, "a test that cannot fail"
    serving.wait_empty()
    drafts, drafted, taken = (now - then for now, then in zip(counted(), before, strict=True))
    assert (drafted, taken) == (accepted + rejected, accepted)
    assert 1 <= drafts <= NUM_TOKENS - 1 - accepted
    per_position = [
        serving.metric(
            "tandem_spec_decode_num_accepted_tokens_per_pos_total",
            method=method_of(serving),
            position=str(position),
        )
        for position in range(8)
    ]
    assert sum(per_position) == total(serving, "accepted_tokens")
    assert per_position == sorted(per_position, reverse=True)
    shown = CliRunner().invoke(tandem, ["status", "--once", "--url", serving.url]).stdout
    row = rf"decode-0 +{method_of(serving)} +\d+ +\d+% +[1-5]\.\d\d "
    assert re.search(row, shown), shown
    metrics = serving.http.get("/metrics").text
    for name in ("decode_draft_seconds", "decode_verify_seconds", "decode_steps", "decode_choices"):
        assert f"\ntandem_spec_{name}_total{{" in metrics, name
    assert serving.worker_states()["decode-0"]["speculation"]["max_tokens"] > 0
    start_up = serving.worker_states()["decode-0"]["start_up"]["speculation"]
    assert start_up.startswith(f"{method_of(serving)} (") and "num_speculative_tokens " in start_up


@on("draft_model_tree")
def test_a_cancelled_stream_leaves_nothing(serving: HttpServing, expected: dict[str, Choices]) -> None:
    body = body_of(REQUESTS["n"], max_tokens=400, stream=True)
    for num_events in (0, 1, 3, 8):
        with serving.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(2 * num_events):
                next(lines)
    serving.wait_empty()
    assert_same(ask(serving, REQUESTS["n"]), expected["n"])


def test_a_decode_workers_death_changes_nothing(expected: dict[str, Choices]) -> None:
    """The worker dies after steps of several tokens each. Another one continues with the request's own draft
    settings.
    """
    workers = {"prefill-0": "", "decode-0": "KILL:after:after_step:4", "decode-1": ""}
    asked = {"num_speculative_tokens": 3}
    with HttpServing(BUNDLED_MODEL, workers, worker_timeout=3.0, **options("draft_model")) as serving:
        for name in ("logprobs", "seeded"):
            assert_same(ask(serving, REQUESTS[name], speculative=asked), expected[name])
        assert 1 <= serving.metric("tandem_requests_placed_again_total") <= 2  # one before it is noticed
        serving.wait_empty()
        drafts, drafted = (total(serving, name) for name in ("drafts", "draft_tokens"))
        assert 2 < drafted / drafts <= 3
