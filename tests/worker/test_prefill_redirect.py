"""Failed hand-offs go to another decode worker or stay, and no prompt is computed twice."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedModel

from protocol.ids import PeerAddress
from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.tiny_model import VOCAB_SIZE, greedy

NOWHERE = PeerAddress(worker_id="decode-x", incarnation="0" * 16, control="tcp://127.0.0.1:9")
NUM_TOKENS = 12
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.3}


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(1, VOCAB_SIZE), k=length)


@pytest.fixture
def prefill(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder))


@pytest.fixture
def decode(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("decode", "decode-1", tiny_config(model_folder))


def computed(cluster: Cluster, worker: RunningWorker) -> float:
    cluster.refresh(worker)
    return worker.counter("computed_tokens_total")


def wait_for_first_token(cluster: Cluster, name: str) -> None:
    cluster.wait(lambda: bool(cluster.outputs[name]))


@pytest.mark.parametrize("length", [1, 50, 64, 200])
def test_another_decode_worker_gets_the_same_blocks(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, reference: PreTrainedModel, length: int
) -> None:
    cluster.generate(prefill, request("r", prompt(length)), NOWHERE)
    failure = cluster.handover_failed("r")
    assert (failure.error_kind, failure.decode_incarnation) == ("transfer", NOWHERE.incarnation)
    assert not failure.manifest_sent
    wait_for_first_token(cluster, "r")
    cluster.redirect(prefill, "r", decode.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(length), NUM_TOKENS)
    assert cluster.sources("r") == ["prefill-0"] + ["decode-1"] * (NUM_TOKENS - 1)
    assert computed(cluster, prefill) == length
    assert computed(cluster, decode) == NUM_TOKENS - 1
    cluster.wait_empty(prefill, decode)
    assert prefill.counter("handoffs_redirected_total") == 1


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stage", ["prefill", "held"])
def test_without_a_decode_worker_the_prefill_worker_decodes(
    cluster: Cluster, model_folder: Path, decode: RunningWorker, stage: str, sampling: dict[str, Any]
) -> None:
    fault = "slow:0.05" if stage == "prefill" else ""
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder), fault=fault)
    cluster.generate(prefill, request("r", prompt(200), **sampling), NOWHERE)
    cluster.handover_failed("r")
    if stage == "held":
        wait_for_first_token(cluster, "r")
    for _ in range(2):  # the second finds the work done
        cluster.redirect(prefill, "r", None)
    cluster.generate(decode, request("whole", prompt(200), **sampling))
    cluster.run("r", "whole")
    assert cluster.tokens("r") == cluster.tokens("whole")
    assert set(cluster.sources("r")) == {"prefill-0"}
    assert computed(cluster, prefill) == 200 + NUM_TOKENS - 1
    cluster.wait_empty(prefill)
    assert prefill.counter("handoffs_kept_total") == 1


KILLED_AT = {
    "before it reserves": "KILL:before:_on_reserve:1",
    "after it reserved": "KILL:after:_on_reserve:1",
    "at the first blocks": "KILL:before:on_transfer:1",
    "at later blocks": "KILL:after:on_transfer:2",
    "at the manifest": "KILL:before:_on_handoff:1",
}


@pytest.mark.parametrize("fault", KILLED_AT.values(), ids=KILLED_AT.keys())
def test_a_killed_decode_worker_costs_no_second_prefill(
    cluster: Cluster, model_folder: Path, decode: RunningWorker, reference: PreTrainedModel, fault: str
) -> None:
    """The redirect may come before the prefill worker notices the death, and may cross its own report."""
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder), fault="slow:0.02")
    doomed = cluster.start("decode", "decode-0", tiny_config(model_folder), fault=fault)
    cluster.generate(prefill, request("r", prompt(400)), doomed.address)
    cluster.wait(lambda: not doomed.process.is_alive())
    cluster.redirect(prefill, "r", decode.address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(400), NUM_TOKENS)
    assert computed(cluster, prefill) == 400
    assert computed(cluster, decode) == NUM_TOKENS - 1
    cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize("again", [False, True], ids=["another", "the same"])
def test_a_redirect_withdraws_the_request(
    cluster: Cluster, model_folder: Path, decode: RunningWorker, reference: PreTrainedModel, again: bool
) -> None:
    """The first decode worker had no error, so its reservation must be given up."""
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder), fault="slow:0.05")
    first = cluster.start("decode", "decode-0", tiny_config(model_folder))
    cluster.generate(prefill, request("r", prompt(640)), first.address)
    cluster.wait(lambda: prefill.counter("reservations_total") == 1)
    cluster.redirect(prefill, "r", (first if again else decode).address)
    cluster.run("r")
    assert cluster.tokens("r") == greedy(reference, prompt(640), NUM_TOKENS)
    assert computed(cluster, prefill) == 640
    cluster.wait_empty(prefill, first, decode)
    assert first.counter("reservations_released_total") == 1
    assert not cluster.failed_handovers["r"]


def test_without_an_answer_it_fails_in_time(cluster: Cluster, model_folder: Path) -> None:
    prefill = cluster.start("prefill", "prefill-0", tiny_config(model_folder, handoff_timeout=1.0))
    started = time.monotonic()
    cluster.generate(prefill, request("r", prompt(50)), NOWHERE)
    cluster.run("r")
    assert time.monotonic() - started < 4.5, "not the five seconds of the others"
    error = cluster.error("r")
    assert error.error_kind == "transfer", "the news got lost, so the router is to place it anew"
    assert "--handoff-timeout" in (error.error or "") and "decode-x" in (error.error or "")
    cluster.wait_empty(prefill)


def test_a_handed_over_request_is_not_held(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker
) -> None:
    cluster.generate(prefill, request("r", prompt(50), max_tokens=900), decode.address)
    cluster.wait(lambda: len(cluster.outputs["r"]) > 10)
    cluster.redirect(prefill, "r", decode.address)
    cluster.wait(lambda: cluster.finished("r"))
    errors = [output for _, output in cluster.outputs["r"] if output.error_kind is not None]
    assert [error.error_kind for error in errors] == ["worker_lost"]
    cluster.abort("r")
    cluster.wait_empty(prefill, decode)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_a_request_with_emitted_tokens_is_handed_over(
    cluster: Cluster, prefill: RunningWorker, decode: RunningWorker, sampling: dict[str, Any]
) -> None:
    """Only the tail of the prompt's blocks and the emitted tokens are computed again."""
    whole = request("whole", prompt(70), max_tokens=30, **sampling)
    cluster.generate(prefill, whole, decode.address)
    cluster.run("whole")
    tokens = cluster.tokens("whole")
    before = computed(cluster, prefill)
    rest = msgspec.structs.replace(whole, request_id="rest", output_token_ids=tokens[:11])
    cluster.generate(prefill, rest, decode.address)
    cluster.run("rest")
    assert cluster.tokens("rest") == tokens[11:]
    assert computed(cluster, prefill) - before == 70 + 11 - 64
    cluster.wait_empty(prefill, decode)
