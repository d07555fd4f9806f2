"""KV goes to another host over `tcp` while the link is slow, far, lossy or cut, with default time-outs."""

from __future__ import annotations

import functools
import itertools
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import tests.e2e.serving
import tests.worker.harness
from protocol.config import ServeConfig
from router.server import RouterServer
from tests.e2e.architectures import prompt
from tests.e2e.conftest import folder, reference
from tests.e2e.serving import HttpServing
from tests.e2e.test_failover import BOUND_S, NUM_TOKENS, REQUESTS, SLOW, Serving, ask, changes
from tests.faults import packet_relay
from tests.faults.network import Network, why_not
from tests.faults.test_networks import run_in_network
from tests.worker.tiny_model import greedy

__all__ = ["folder", "reference"]

DEFAULTS = ServeConfig()
RATE = 4_000_000
"""Bits per second of a slow link."""

DELAY_S = 0.05
LOSS = 0.05
SENT_AGAIN = 6
"""TCP retransmissions over a cut link. They take most of a second, since TCP doubles its wait each time."""

WIRE = {"kv_transfers_total", "kv_transfer_bytes_total"}


class Link:
    """Two workers on different hosts, and counters of the traffic between them."""

    def __init__(self, network: Network, serving: HttpServing) -> None:
        self.network, self.serving = network, serving
        self._salts = map(str, itertools.count())
        self._clients = ThreadPoolExecutor(len(REQUESTS))
        self.expected = tokens(self.ask())

    def ask(self) -> list[Future[dict[str, Any]]]:
        """Stream all requests with a fresh cache salt, so that no worker has their KV."""
        salted = functools.partial(ask, self.serving, stream=True, cache_salt=next(self._salts))
        return [self._clients.submit(salted, request) for request in REQUESTS]

    def moved(self) -> dict[str, float]:
        """Return the prefill worker's counters of transfers and bytes to the decode worker."""
        pairs = self.serving.worker_states()["prefill-0"]["pairs"]
        (pair,) = [pair for pair in pairs if pair["peer"] == "decode-0" and pair["transport"] == "tcp"]
        return {name: pair["counters"].get(name, 0.0) for name in WIRE}

    def serve(self) -> tuple[float, float]:
        """Serve all requests over this link. Return their seconds, and the bytes that were moved."""
        before, elsewhere, began = self.moved(), self.elsewhere(), time.monotonic()
        self.check(self.ask())
        seconds = time.monotonic() - began
        assert self.elsewhere() == elsewhere
        self.serving.wait(lambda: self.moved()["kv_transfers_total"] >= before["kv_transfers_total"] + 4)
        return seconds, self.moved()["kv_transfer_bytes_total"] - before["kv_transfer_bytes_total"]

    def check(self, answers: list[Future[dict[str, Any]]]) -> None:
        """Check that the tokens are those over an undisturbed link, and that every worker is empty."""
        assert tokens(answers) == self.expected
        self.serving.wait_empty()
        assert self.serving.metric("tandem_request_failures_total") == 0

    def elsewhere(self) -> float:
        """Count the requests that left their first placement."""
        return changes(self.serving) + self.serving.counter("prefill-0", "handoffs_kept_total")

    def close(self) -> None:
        self._clients.shutdown()


def tokens(answers: list[Future[dict[str, Any]]]) -> list[list[int]]:
    return [answer.result(BOUND_S)["token_ids"] for answer in answers]


def sent_again(network: str) -> int:
    """Return how many TCP segments a host has retransmitted."""
    inside = ["ip", "netns", "exec", network, "cat", "/proc/net/snmp"]
    lines = subprocess.run(inside, check=True, capture_output=True, text=True).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


@pytest.fixture(scope="module")
def link(folder: Path, reference: PreTrainedModel) -> Iterator[Link]:
    if reason := why_not():
        pytest.skip(reason)
    network = Network(joined=True)
    where = {"prefill-0": network.left, "decode-0": network.right}
    names = ("handoff_timeout", "worker_timeout", "kv_transports")
    defaults = {name: getattr(DEFAULTS, name) for name in names}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tests.worker.harness, "run_child", functools.partial(run_in_network, where))
            router = functools.partial(RouterServer, link_host=network.hosts[""])
            patch.setattr(tests.e2e.serving, "RouterServer", router)
            workers = {"prefill-0": SLOW, "decode-0": ""}
            # The cost policy sends no KV over a link that was bad until it knows better.
            with Serving(folder, workers, placement="least_loaded", **defaults) as serving:
                link = Link(network, serving)
                assert link.expected[0] == greedy(reference, prompt(REQUESTS[0]["length"]), NUM_TOKENS)
                yield link
                link.close()
    finally:
        network.close()


def test_a_slow_link(link: Link) -> None:
    with link.network.slowed(f"{RATE}bit"):
        seconds, nbytes = link.serve()
    assert seconds > nbytes * 8 / RATE / 2, "it was not slow"
    link.serve()


def test_a_far_and_lossy_link(link: Link) -> None:
    if reason := packet_relay.why_not():
        pytest.skip(reason)
    with link.network.relayed(DELAY_S, LOSS) as end:
        seconds, _ = link.serve()
        lost = end()
    assert lost > 0 and seconds > 4 * DELAY_S
    link.serve()


@pytest.mark.parametrize("cut", ["between the workers", "off the network"])
def test_a_link_is_cut_and_mended(link: Link, cut: str) -> None:
    """A host without network counts as lost; while only the workers' link is cut, the router sees both."""
    network, serving = link.network, link.serving
    placed = serving.metric("tandem_placements_total")
    elsewhere = link.elsewhere()
    answers = link.ask()
    serving.wait(lambda: serving.metric("tandem_placements_total") > placed)
    if cut == "between the workers":
        ways = [(network.left, network.right), (network.right, network.left)]
        for way in ways:
            network.cut(*way)
        enough = sent_again(network.left) + SENT_AGAIN
        serving.wait(lambda: sent_again(network.left) >= enough)
        assert not all(answer.done() for answer in answers)
        for way in ways:
            network.mend(*way)
    else:
        network.unplug(network.right)
        serving.wait(lambda: "decode-0" not in serving.worker_states())
        network.plug_in(network.right)
    link.check(answers)
    assert cut == "off the network" or link.elsewhere() == elsewhere, (
        "what was under way goes on over the link"
    )
    link.serve()
