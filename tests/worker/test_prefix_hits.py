"""Prefixes that workers fetch and find: a holder that freezes changes nothing, and drafts cost no hits."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.worker.harness import Cluster, RunningWorker, request, tiny_config
from tests.worker.prefix_hits import DRAFTERS, FAMILIES, PLACES, TURNS, chats, write_family
from tests.worker.tiny_model import greedy, prompt

CASES = [(family, method, "auto") for family in FAMILIES for method in DRAFTERS]
"""The model, the method, and the worker that computes a prompt's draft KV. Chats with self-speculation have
the methods without weights, too.
"""
CASES += [("Llama", "draft_model", "carry"), ("Llama", "draft_model", "rebuild")]
PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    return cache(lambda name: write_family(name, tmp_path_factory.mktemp("family")))


@cache
def documented() -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return the page's shares of accepted tokens in each place, by model and method."""
    section = PAGE.read_text().partition("## Prefix hits")[2].partition("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    found = {}
    for method, *cells in rows:
        for family, cell in zip(head[1:], cells, strict=True):
            parts = [re.sub(r"^(\D*) ", r"\1:", part).rpartition(":") for part in cell.split(", ")]
            rates = {place: [int(each[:-1]) / 100 for each in shares.split()] for place, _, shares in parts}
            found[family, method.strip("`")] = {
                place: rates.get(place, rates.get("", [])) for place in PLACES
            }
    return found


@pytest.mark.parametrize(("family", "method", "prefill"), CASES)
def test_drafts_cost_no_hits(
    family: str, method: str, prefill: str, families: Callable[[str], dict[str, Path]]
) -> None:
    is_in_table = prefill == "auto"
    found = chats(families(family), method, turns=TURNS if is_in_table else 3, prefill=prefill)
    plain = found.pop("none")
    for drafter, by_place in found.items():
        for place, chat in by_place.items():
            assert chat.cached == plain[place].cached, (drafter, place)
            assert chat.answers == plain[place].answers, (drafter, place)
            own, others = chat.acceptance(), by_place["colocated"].acceptance()
            # After a hand-off a recurrent model computes up to 15 tokens again, in a step without drafts.
            # Another worker's suffixes are those of other answers. A head does not know the hidden state
            # before a hit's end, and another worker's hits end elsewhere.
            reads_hidden = drafter in ("eagle", "mtp")
            differs = drafter == "suffix" or (place == "split" and ("hybrid" in family or reads_hidden))
            slack = 0.1 if differs else 0.0
            assert own == pytest.approx(others, abs=slack), (drafter, place)
            if is_in_table:
                assert own == pytest.approx(documented()[family, drafter][place], abs=0.03), (drafter, place)
        assert by_place["colocated"].acceptance()[0] > 0, drafter
    for place, chat in plain.items():
        assert all(chat.cached[1:]), place
    if is_in_table:
        assert [sum(plain[place].cached) for place in PLACES] == [576, 480, 576]


PATIENT = "fetch:25"
"""The worker waits this many seconds for the next block, however busy the machine is."""


@pytest.fixture
def holder(cluster: Cluster, model_folder: Path) -> RunningWorker:
    """Start a prefill worker that has computed a prompt of 200 tokens."""
    worker = cluster.start("prefill", "prefill-1", tiny_config(model_folder))
    cluster.serve(worker, request("before", prompt(200), max_tokens=1))
    return worker


@pytest.fixture
def asking(cluster: Cluster, model_folder: Path) -> RunningWorker:
    return cluster.start("prefill", "prefill-0", tiny_config(model_folder))


def test_local_blocks_are_not_fetched(
    cluster: Cluster, model_folder: Path, holder: RunningWorker, reference: PreTrainedModel
) -> None:
    asking = cluster.start("prefill", "prefill-0", tiny_config(model_folder), PATIENT)
    cluster.serve(asking, request("half", prompt(200)[:100], max_tokens=1))
    cluster.serve(asking, request("r", prompt(200)), prefix=holder.address)
    cluster.serve(asking, request("again", prompt(200)), prefix=holder.address)
    for name in ("r", "again"):
        assert cluster.tokens(name) == greedy(reference, prompt(200), 12)
    cluster.wait_empty(holder, asking)
    assert asking.counter("prefix_blocks_fetched_total") == 12 - 6
    assert asking.counter("prefix_fetches_total") == 1


def test_a_frozen_holder_that_wakes_up_late_changes_nothing(
    cluster: Cluster, holder: RunningWorker, asking: RunningWorker, reference: PreTrainedModel
) -> None:
    holder.signal(signal.SIGSTOP)
    try:
        cluster.generate(asking, request("r", prompt(200)), prefix=holder.address)
        cluster.run("r", timeout_s=20)
    finally:
        holder.signal(signal.SIGCONT)
    assert cluster.tokens("r") == greedy(reference, prompt(200), 12)
    cluster.wait(lambda: holder.state.counters.get("kv_leases_failed_total") == 1)
    cluster.wait_empty(holder, asking)
    cluster.serve(asking, request("next", prompt(200)[:150] + prompt(40, seed=9)))
    assert cluster.tokens("next") == greedy(reference, prompt(200)[:150] + prompt(40, seed=9), 12)
