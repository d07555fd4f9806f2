"""Workers are killed or frozen at every point of a request; clients see the same answers. fp32."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.e2e.architectures import prompt
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import greedy

Answers = list[dict[str, Any]]
NUM_TOKENS = 24
BOUND_S = 40.0
"""The longest wait for an answer, which is shorter than it takes until a silent worker counts as lost."""
Serving = partial(HttpServing, compile="off", worker_timeout=4 * BOUND_S)
"""Serves by torch's modules, whose steps leave time for the faults."""
SLOW = "slow:0.02"
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
REQUESTS: list[dict[str, Any]] = [
    {"length": 405, "temperature": 0},
    {"length": 75, "temperature": 1.0, "seed": 1, "logprobs": 2},
    {"length": 33, "temperature": 0.9, "seed": 2, "min_tokens": 9, "stop_token_ids": [7], **PENALTIES},
    {"length": 130, "temperature": 1.3, "top_k": 20, "seed": -3, "stream": True},
]

DECODE_KILLED = {
    "before it reserves": "KILL:before:_on_reserve:1",
    "after it reserved": "KILL:after:_on_reserve:1",
    "at the first blocks": "KILL:before:on_transfer:1",
    "at later blocks": "KILL:after:on_transfer:2",
    "at the manifest": "KILL:before:_on_handoff:1",
    "as it decodes": "KILL:after:after_step:7",
}
PREFILL_KILLED = {
    "before the first token": "KILL:after:_reserve:1",
    "as it pushes": "KILL:after:_push:3",
    "after the first token": "KILL:after:_on_first_token:1",
    "at the manifest": "KILL:before:_send_manifest:1",
    "after the manifest": "KILL:after:_send_manifest:1",
}
HANDED_OVER = "KILL:after:_send_manifest"
"""From this point on, the decode worker may have all that it needs to continue alone."""


@pytest.fixture(scope="module")
def expected(folder: Path, reference: PreTrainedModel) -> Answers:
    """Return the answers of an undisturbed server."""
    with Serving(folder) as serving:
        answers = [ask(serving, request) for request in REQUESTS]
    assert answers[0]["token_ids"] == greedy(reference, prompt(REQUESTS[0]["length"]), NUM_TOKENS)
    return [answer | {"logprobs": pytest.approx(answer["logprobs"], abs=1e-4)} for answer in answers]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(REQUESTS)) as executor:
        yield executor


def ask(serving: HttpServing, request: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return an answer's token ids, text, log-probabilities, usage and finish reason, streamed or not."""
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **request, **fields}
    body |= {"model": "model", "prompt": prompt(body.pop("length"))}
    if body.pop("stream", False):
        chunks = serving.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
        usage = chunks.pop()["usage"]
    else:
        answer = serving.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        chunks = [answer.json()]
        usage = chunks[0]["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    usage.pop("prompt_tokens_details")  # cached tokens depend on earlier requests
    logprobs = choices[0]["logprobs"]
    return {
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": logprobs and logprobs["token_logprobs"],
        "finish_reason": choices[-1]["finish_reason"],
        "usage": usage,
    }


def ask_all(serving: HttpServing, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
    """Start all requests. The first, the longest, goes to the workers numbered 0 unless they are late."""
    serving.wait(lambda: not any(worker.is_suspect for worker in serving.router.state.registry))
    first = pool.submit(ask, serving, REQUESTS[0])
    serving.wait(lambda: serving.metric("tandem_placements_total") > 0)
    return [first, *(pool.submit(ask, serving, request) for request in REQUESTS[1:])]


def changes(serving: HttpServing) -> float:
    """Count how often a request or a hand-off changed its worker."""
    names = ("requests_placed_again", "handoff_redirects", "handoff_takeovers")
    return sum(serving.metric(f"tandem_{name}_total") for name in names)


def check_afterwards(serving: HttpServing, expected: Answers) -> None:
    """Check that the survivors hold nothing and serve the next request."""
    serving.wait_empty()
    assert ask(serving, REQUESTS[1]) == expected[1]
    serving.wait_empty()
    assert serving.metric("tandem_request_failures_total") == 0


# With a second worker of the role, or without.
KILLED = {
    "decode-0-1": ("before it reserves", "at the first blocks", "at the manifest", "as it decodes"),
    "prefill-0-1": ("as it pushes", "after the first token", "at the manifest"),
    "decode-0": ("after it reserved", "as it decodes"),
    "prefill-0": ("before the first token", "after the manifest"),
}


@pytest.mark.parametrize(("group", "point"), [(group, point) for group in KILLED for point in KILLED[group]])
def test_a_worker_is_killed(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers, group: str, point: str
) -> None:
    """The role's other worker takes over, or else a worker of the other role. Survivors hold nothing."""
    role, *numbers = group.split("-")
    fault = (DECODE_KILLED if role == "decode" else PREFILL_KILLED)[point]
    workers = {"prefill-0": SLOW, "decode-0": ""} | {f"{role}-{number}": "" for number in numbers}
    workers[doomed := f"{role}-0"] = fault if role == "decode" else f"{fault}+{SLOW}"
    with Serving(folder, workers) as serving:
        started = time.monotonic()
        answers = ask_all(serving, pool)
        serving.bury(doomed)
        assert [answer.result(BOUND_S) for answer in answers] == expected
        assert time.monotonic() - started < BOUND_S
        assert changes(serving) > 0 or fault.startswith(HANDED_OVER)
        check_afterwards(serving, expected)


@pytest.mark.parametrize("point", ["at later blocks", "as it decodes"])
def test_a_dead_decode_worker_costs_little_recomputation(folder: Path, expected: Answers, point: str) -> None:
    """A death before the hand-off costs no recomputation. A later one costs the emitted tokens and the last
    block's.
    """
    workers = {"prefill-0": SLOW, "decode-0": DECODE_KILLED[point], "decode-1": ""}
    length = REQUESTS[0]["length"]
    with Serving(folder, workers) as serving, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, serving, REQUESTS[0])
        serving.bury("decode-0")
        assert answer.result(BOUND_S) == expected[0]
        serving.wait_empty()
        computed = serving.counter("prefill-0", "computed_tokens_total")
        if serving.metric("tandem_requests_placed_again_total"):
            emitted = serving.worker_states()["prefill-0"]["prefix_query_tokens"] - 2 * length
            assert 0 < emitted < NUM_TOKENS
            assert computed == length + length % 16 + emitted
        else:
            assert computed == length
            assert serving.metric("tandem_handoff_redirects_total") == 1
        assert (point == "as it decodes") <= bool(serving.metric("tandem_requests_placed_again_total"))


def test_a_third_worker_fetches_the_prefix_from_a_peer(folder: Path, expected: Answers) -> None:
    workers = {"decode-0": "", "decode-1": f"KILL:after:after_step:7+{SLOW}", "decode-2": ""}
    length = REQUESTS[0]["length"]
    with Serving(folder, workers) as serving, ThreadPoolExecutor(1) as pool:
        assert ask(serving, REQUESTS[0]) == expected[0]
        serving.wait(lambda: serving.metric("tandem_kv_index_blocks") >= length // 16)
        answer = pool.submit(ask, serving, REQUESTS[0])
        serving.bury("decode-1")
        assert answer.result(BOUND_S) == expected[0]
        serving.wait_empty()
        assert serving.counter("decode-2", "prefix_blocks_fetched_total") >= length // 16
        assert serving.counter("decode-2", "computed_tokens_total") < 16 + NUM_TOKENS
        assert serving.metric("tandem_requests_placed_again_total") == 1


@pytest.mark.parametrize(
    ("frozen", "point"),
    [
        ("decode-0", "STOP:before:_on_handoff:1"),
        ("prefill-0", "STOP:after:_push:3"),
        ("decode-0", "block:after:after_step:7"),
        ("prefill-0", "spin:after:_push:3"),
    ],
)
def test_a_worker_that_wakes_from_a_freeze_changes_nothing(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers, frozen: str, point: str
) -> None:
    """After it wakes, it works on requests that others have taken over. A worker with a stuck loop still
    sends heartbeats.
    """
    workers = {"prefill-0": "", "prefill-1": "", "decode-0": "", "decode-1": ""}
    workers[frozen] = f"{point}+{SLOW}"
    with Serving(folder, workers, worker_timeout=3.0) as serving:
        answers = ask_all(serving, pool)
        assert [answer.result(BOUND_S) for answer in answers] == expected
        assert changes(serving) > 0
        serving.wait(lambda: frozen not in serving.worker_states())
        serving.workers[frozen].signal(signal.SIGCONT if "STOP" in point else signal.SIGUSR1)
        serving.wait(lambda: frozen in serving.worker_states())
        reason = "silent" if "STOP" in point else "stalled"
        assert serving.metric("tandem_workers_lost_total", reason=reason) == 1
        check_afterwards(serving, expected)


@pytest.mark.parametrize(
    ("frozen", "point"), [("decode-0", "STOP:after:after_step:7"), ("prefill-0", "STOP:after:_push:3")]
)
def test_requests_go_on_elsewhere_before_a_frozen_worker_counts_as_lost(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers, frozen: str, point: str
) -> None:
    """Their copies are first. After it wakes, nothing of them is left on it."""
    workers = {"prefill-0": "", "prefill-1": "", "decode-0": "", "decode-1": ""}
    workers[frozen] = f"{point}+{SLOW}"
    with Serving(folder, workers) as serving:
        answers = ask_all(serving, pool)
        assert [answer.result(BOUND_S) for answer in answers] == expected
        assert serving.metric("tandem_requests_placed_again_total", reason="raced") > 0
        serving.workers[frozen].signal(signal.SIGCONT)
        check_afterwards(serving, expected)
        assert serving.metric("tandem_workers_lost_total") == 0


def test_without_workers_each_request_gets_one_error(folder: Path) -> None:
    """The error is an event in a stream, and a status otherwise."""
    fault = f"KILL:after:after_step:15+{SLOW}"
    with Serving(folder, {"decode-0": fault}) as serving, ThreadPoolExecutor(2) as pool:
        body = {"prompt": prompt(REQUESTS[0]["length"]), "max_tokens": NUM_TOKENS, "ignore_eos": True}
        whole = pool.submit(serving.http.post, "/v1/completions", json=body)
        events = pool.submit(serving.events, "/v1/completions", body)
        serving.bury("decode-0")
        assert whole.result(BOUND_S).status_code == 502
        assert events.result(BOUND_S)[-1]["error"]["code"] == "worker_lost"
