"""Control messages of a hand-off that moves nothing, since the decode worker has the whole prompt cached.

A real decode worker answers; the messages of the prefill worker come from here, over the same sockets and
encoding, so that no computing hides or adds to them: Reserve until Reserved, then Handoff until HandoffAck.
The same hand-off between two real workers, less what their engines compute, stands beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import TypeVar

from bench.transfer.echo import EchoPeer
from bench.transfer.figures import Figure
from bench.transfer.idle import IDLE_S
from bench.transfer.workers import Cluster, random_prompt
from messaging.sockets import connect_dealer
from protocol.codec import encode, peer_reply
from protocol.config import ServeConfig
from protocol.handoff import HandoffManifest, SamplingState, SegmentInfo
from protocol.ids import new_incarnation, token_ids_digest
from protocol.requests import EngineRequest
from protocol.worker_to_worker import Handoff, HandoffAck, PeerRequest, Reserve, Reserved

PROMPT_LEN = 960
HANDOFFS = 100
_ANSWER_S = 30.0
_ANSWER_BYTES = 400
"""About what a Reserved, a Handoff or a HandoffAck takes."""

Reply = TypeVar("Reply")


class PrefillSide:
    """Says what a prefill worker says, without computing anything."""

    def __init__(self, cluster: Cluster, decode: str, segments: list[SegmentInfo]) -> None:
        self._peer = cluster.address(decode)
        self._incarnation = new_incarnation()
        self._segments = segments
        identity = f"prefill-bench:{self._incarnation}"
        self._socket = connect_dealer(cluster.context, cluster.keys, self._peer.control, identity)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, message: PeerRequest, answer: type[Reply]) -> Reply:
        self._socket.send(encode(message))
        if not self._socket.poll(int(_ANSWER_S * 1000)):
            raise RuntimeError(f"no {answer.__name__} came")
        reply = peer_reply.decode(self._socket.recv())
        if not isinstance(reply, answer):
            raise RuntimeError(f"instead of {answer.__name__} came {reply}")
        return reply

    def hand_off(self, request: EngineRequest) -> float:
        """Seconds of all of its messages."""
        reserve = Reserve(
            incarnation=self._peer.incarnation,
            request=request,
            prefill_worker="prefill-bench",
            prefill_incarnation=self._incarnation,
            segments=self._segments,
            ttl_s=_ANSWER_S,
        )
        started = time.perf_counter()
        grant = self._ask(reserve, Reserved)
        if grant.covered < len(request.prompt_token_ids):
            raise RuntimeError("the prompt is not cached")
        ack = self._ask(Handoff(manifest=self._manifest(request, grant)), HandoffAck)
        seconds = time.perf_counter() - started
        if ack.error is not None:
            raise RuntimeError(ack.error)
        return seconds

    def _manifest(self, request: EngineRequest, grant: Reserved) -> HandoffManifest:
        token_ids = request.prompt_token_ids
        return HandoffManifest(
            request_id=request.request_id,
            lease_id=grant.lease_id,
            prefill_worker="prefill-bench",
            prefill_incarnation=self._incarnation,
            decode_incarnation=grant.incarnation,
            num_tokens=len(token_ids),
            token_ids_digest=token_ids_digest(token_ids),
            segments=self._segments,
            state_position=len(token_ids),
            extents=grant.extents,
            pushed_blocks=0,
            first_token=1,
            first_token_position=len(token_ids),
            sampling=SamplingState(seed=request.sampling.seed, num_output_tokens=1),
        )


def messages(repeats: int) -> Iterator[Figure]:
    config = ServeConfig(
        dtype="bfloat16",
        device="cpu",
        compile="off",
        worker_threads=1,
        kv_cache_memory_bytes=256 * 1024 * 1024,
        log_level="warning",
    )
    with Cluster() as cluster:
        cluster.start(("prefill", "prefill-0", config), ("decode", "decode-0", config))
        prompt = random_prompt(PROMPT_LEN, cluster.vocab_size("decode-0"), seed=0)
        for worker_id in ("prefill-0", "decode-0"):
            cluster.generate(worker_id, prompt, 2)
        yield _message_path(cluster, prompt)
        yield _between_workers(cluster, prompt)
        yield _idle_workers(cluster)


def _message_path(cluster: Cluster, prompt: list[int]) -> Figure:
    """Bare round trips of a Reserve's and a Handoff's size take turns with the hand-offs."""
    side = PrefillSide(cluster, "decode-0", _bundled_segments())
    times, bare = [], []
    reserve_bytes = len(encode(cluster.request(prompt, 2)))
    with EchoPeer(cluster.context, cluster.keys, _ANSWER_BYTES) as echo:
        for _ in range(HANDOFFS):
            bare.append(echo.round_trip(reserve_bytes) + echo.round_trip(_ANSWER_BYTES))
            cluster.rest(0.02)
            times.append(side.hand_off(cluster.request(prompt, 2)))
            cluster.rest(0.02)  # the decode worker ends the request
    side.close()
    settled = HANDOFFS // 10
    return Figure(
        what="control messages of a cached hand-off, to a real decode worker after a rest",
        value=statistics.median(times[settled:]) * 1e3,
        unit=" ms",
        at_most=1.0,
        ours=f"{PROMPT_LEN} tokens, {HANDOFFS} times",
        baseline=f"{statistics.median(bare[settled:]) * 1e3:.2f} ms of as many bare round trips",
        samples=[seconds * 1e3 for seconds in times],
    )


def _between_workers(cluster: Cluster, prompt: list[int]) -> Figure:
    cluster.generate("prefill-0", prompt, 2, decode="decode-0")
    before = cluster.counters("prefill-0")
    for _ in range(HANDOFFS):
        cluster.generate("prefill-0", prompt, 2, decode="decode-0")
    after = cluster.counters("prefill-0")
    spent = {name: after[name] - before[name] for name in after}
    seconds = spent["handoff_seconds_total"] - spent["engine_seconds_total"]
    return Figure(
        what="the same between two workers, less the engine's steps (mean)",
        value=seconds / spent["handoffs_total"] * 1e3,
        unit=" ms",
        at_most=1.0,
        ours=f"{spent['kv_blocks_pushed_total']:.0f} blocks pushed",
    )


def _idle_workers(cluster: Cluster) -> Figure:
    workers = ("prefill-0", "decode-0")
    cluster.rest(1.0)
    before, started = cluster.cpu_seconds(*workers), time.monotonic()
    cluster.rest(IDLE_S)
    used, seconds = cluster.cpu_seconds(*workers) - before, time.monotonic() - started
    return Figure(
        what="idle pair of workers, both processes with heartbeats",
        value=used / seconds * 100,
        unit=" %",
        ours=f"{used * 1e3:.0f} ms of CPU in {seconds:.0f} s",
        baseline="one core",
    )


def _bundled_segments() -> list[SegmentInfo]:
    """Of the bundled model's blocks: 4 layers, 16 tokens, 2 KV heads of 64."""
    return [SegmentInfo(name="target", dtype="bfloat16", shape=(4, 2, 16, 2, 64))]
