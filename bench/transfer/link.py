"""`tcp` between two hosts over a shaped link, against iperf3 over the same link, and with int8 on the wire.

The hosts are network namespaces. Our own relay delays the packets. They have 9000 bytes, because the relay
handles each of them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench import network, packet_relay
from bench.network import Network, enter
from bench.transfer.figures import Figure, ratio_figure
from bench.transfer.process import ProcessObject
from bench.transfer.sides import Pair, ReceivingSide, Side, scattered
from kvtransfer.blocks.layout import block_bytes
from kvtransfer.transports.registry import TransportOptions
from protocol.handoff import SegmentInfo

RATE, DELAY_S, MTU = "1gbit", 0.001, 9000
SEGMENTS = (SegmentInfo(name="target", dtype="bfloat16", shape=(28, 2, 16, 8, 128)),)
"""The KV of a 0.6B model: 1.75 MiB for 16 tokens."""
BLOCK_BYTES = block_bytes(SEGMENTS)
BLOCK_TOKENS = SEGMENTS[0].shape[2]
PROMPT_TOKENS = 1024


def make_on(network: str, make: Callable[..., Side], *arguments: Any) -> Side:
    enter(network)
    return make(*arguments)


def iperf3_seconds(hosts: Network, nbytes: int) -> float:
    """Return iperf3's seconds to move `nbytes` bytes from left to right over one connection."""
    address = hosts.hosts[hosts.right]
    listen = ["iperf3", "-s", "-1", "-B", address, "--forceflush"]
    server = subprocess.Popen(
        ["ip", "netns", "exec", hosts.right, *listen], stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        if not any("Server listening" in line for line in server.stdout):
            raise RuntimeError("iperf3's server does not start")
        ask = ["iperf3", "-c", address, "-n", str(nbytes), "-J"]
        client = ["ip", "netns", "exec", hosts.left, *ask]
        done = subprocess.run(client, capture_output=True, text=True, timeout=60, check=False)
        server.terminate()
    report = json.loads(done.stdout)
    if "error" in report:
        raise RuntimeError(f"iperf3: {report['error']}")
    return float(nbytes * 8 / report["end"]["sum_received"]["bits_per_second"])


def pair_over(hosts: Network, wire_dtype: str, num_blocks: int) -> Pair:
    """Return a pair with the sender on the left host and the receiver on the right one."""

    def start(side: type[Side], *arguments: Any) -> ProcessObject:
        where = hosts.right if issubclass(side, ReceivingSide) else hosts.left
        options = TransportOptions(wire_dtype=wire_dtype)
        return ProcessObject(partial(make_on, where, side), *arguments, options, SEGMENTS, hosts.hosts[where])

    return Pair(["tcp"], BLOCK_BYTES, num_blocks, start=start)


def why_not() -> str:
    """Return why this cannot be measured here, or an empty string."""
    if shutil.which("iperf3") is None:
        return "there is no iperf3"
    return packet_relay.why_not() or network.why_not()


def link(repeats: int) -> Iterator[Figure]:
    if reason := why_not():
        raise RuntimeError(reason)
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    nbytes, order = num_blocks * BLOCK_BYTES, scattered(num_blocks)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(contextlib.closing(Network(mtu=MTU)))
        stack.enter_context(hosts.slowed(RATE))
        stack.enter_context(hosts.relayed(DELAY_S))
        plain, packed = (
            stack.enter_context(pair_over(hosts, dtype, num_blocks)) for dtype in ("auto", "int8")
        )
        rounds = [
            (
                iperf3_seconds(hosts, nbytes),
                plain.move("tcp", order).seconds,
                packed.move("tcp", order).seconds,
            )
            for _ in range(repeats + 1)
        ][1:]
    place = f"tcp, {RATE} and {DELAY_S * 1e3:g} ms each way"
    yield ratio_figure(place, [(theirs, ours) for theirs, ours, _ in rounds], nbytes, 0.9, "iperf3")
    rates = [
        PROMPT_TOKENS / statistics.median(seconds)
        for seconds in zip(*(each[1:] for each in rounds), strict=True)
    ]
    ratios = [plain / packed for _, plain, packed in rounds]
    yield Figure(
        what=f"{place}: tokens with int8 on the wire",
        value=statistics.median(ratios),
        at_least=1.8,
        ours=f"{rates[1]:.0f} tokens/s",
        baseline=f"bfloat16 {rates[0]:.0f} tokens/s",
        samples=ratios,
    )
