"""Plays one end of a hand-off against a real worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from engine.engine import Engine
from kvtransfer.interface import Completed, RegisteredPool, SendEvent
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.registry import TransportOptions, open_transports
from messaging.sockets import bind_router, connect_dealer
from protocol.codec import encode, peer_reply, peer_request
from protocol.handoff import Extent, HandoffManifest, SamplingState, SegmentInfo
from protocol.ids import PeerAddress, new_incarnation, token_ids_digest
from protocol.requests import EngineRequest
from protocol.worker_to_worker import Handoff, PeerReply, PeerRequest, Release, Reserve, Reserved
from tests.waiting import wait_until
from tests.worker.harness import WAIT_S, Cluster

Message = TypeVar("Message")


def manifest(
    request: EngineRequest,
    grant: Reserved,
    segments: Sequence[SegmentInfo],
    prefill_worker: str,
    prefill_incarnation: str,
    first_token: int,
) -> HandoffManifest:
    """Return a manifest that the decode worker of the grant accepts."""
    tokens = request.prompt_token_ids
    return HandoffManifest(
        request_id=request.request_id,
        lease_id=grant.lease_id,
        prefill_worker=prefill_worker,
        prefill_incarnation=prefill_incarnation,
        decode_incarnation=grant.incarnation,
        num_tokens=len(tokens),
        token_ids_digest=token_ids_digest(tokens),
        segments=list(segments),
        state_position=len(tokens),
        extents=grant.extents,
        pushed_blocks=len(grant.extents[0].blocks) - grant.covered // grant.block_size,
        first_token=first_token,
        first_token_position=len(tokens),
        sampling=SamplingState(seed=request.sampling.seed, num_output_tokens=1),
    )


class PrefillEnd:
    """Plays the prefill worker: computes prompts with its own engine, and sends what the test likes."""

    def __init__(
        self,
        cluster: Cluster,
        decode: PeerAddress,
        engine: Engine,
        pool: RegisteredPool,
        name: str = "prefill-t",
        transports: Sequence[str] = ("shm", "tcp"),
        wire_options: TransportOptions = TransportOptions(),
    ) -> None:
        self.name, self.incarnation, self.decode, self.engine = name, new_incarnation(), decode, engine
        self._socket = connect_dealer(
            cluster.context, cluster.keys, decode.control, f"{name}:{self.incarnation}"
        )
        self._wires = open_transports(transports, pool, self.incarnation, wire_options)
        self.sender = Sender(
            pool,
            key=cluster.keys.transfer_key,
            worker_id=name,
            incarnation=self.incarnation,
            transports=self._wires,
            on_event=lambda: None,
        )

    def close(self) -> None:
        self.sender.close()
        self._socket.close()

    def send(self, message: PeerRequest) -> None:
        self.send_raw(encode(message))

    def send_raw(self, raw: bytes) -> None:
        self._socket.send(raw)

    def drop_replies(self) -> None:
        while self._socket.poll(0):
            self._socket.recv()

    def receive(self, kind: type[Message], timeout_s: float = WAIT_S) -> Message:
        assert self._socket.poll(int(timeout_s * 1000)), f"no {kind.__name__} comes"
        reply: PeerReply = peer_reply.decode(self._socket.recv())
        assert isinstance(reply, kind), reply
        return reply

    def silent(self, seconds: float) -> bool:
        return not self._socket.poll(int(seconds * 1000))

    def reserve_message(self, request: EngineRequest, ttl_s: float = 20.0, **changes: Any) -> Reserve:
        message = Reserve(
            incarnation=self.decode.incarnation,
            request=request,
            prefill_worker=self.name,
            prefill_incarnation=self.incarnation,
            segments=self.engine.pool.segments,
            ttl_s=ttl_s,
        )
        return msgspec.structs.replace(message, **changes)

    def reserve(self, request: EngineRequest, ttl_s: float = 20.0) -> Reserved:
        self.send(self.reserve_message(request, ttl_s))
        return self.receive(Reserved)

    def prefill(self, request: EngineRequest) -> tuple[list[int], int]:
        """Compute the prompt here. Return its blocks and the first token."""
        self.engine.add(request, prefill_only=True)
        while True:
            for output in self.engine.step().outputs:
                return self.engine.computed(request.request_id)[0].blocks, output.token_ids[0]

    def push(self, grant: Reserved, blocks: list[int], first: int = 0, end: int | None = None) -> None:
        """Push the granted blocks [first, end). Without `end` this includes the end of the lease."""
        num_tokens = len(blocks) * 16 if end is None else end * 16
        extents = [Extent(0, blocks[first:end])]
        self.sender.push(self.decode, grant.lease_id, extents, first, num_tokens, final=end is None)

    def pushed(self, grant: Reserved, event: type[SendEvent] = Completed) -> None:
        """Wait until the receiver has everything, or until another `event` of the lease."""
        wait_until(
            lambda: any(isinstance(e, event) and e.lease_id == grant.lease_id for e in self.sender.poll())
        )

    def manifest(
        self, request: EngineRequest, grant: Reserved, token: int, /, **changes: Any
    ) -> HandoffManifest:
        segments = self.engine.pool.segments
        right = manifest(request, grant, segments, self.name, self.incarnation, token)
        return msgspec.structs.replace(right, **changes)

    def hand_off(self, request: EngineRequest, grant: Reserved, first_token: int) -> None:
        self.send(Handoff(manifest=self.manifest(request, grant, first_token)))

    def release(self, request: EngineRequest, lease_id: str) -> None:
        incarnation = self.decode.incarnation
        self.send(Release(incarnation=incarnation, lease_id=lease_id, request_id=request.request_id))


class DecodeEnd:
    """Plays the decode worker: answers as the test likes, with a pool that nobody computes with."""

    def __init__(self, cluster: Cluster, pool: RegisteredPool, name: str = "decode-t") -> None:
        self._socket, endpoint = bind_router(cluster.context, cluster.keys, "127.0.0.1")
        self.incarnation = new_incarnation()
        self._wires = open_transports(["shm", "tcp"], pool, self.incarnation)
        self.receiver = Receiver(
            pool,
            key=cluster.keys.transfer_key,
            worker_id=name,
            incarnation=self.incarnation,
            transports=self._wires,
            host="127.0.0.1",
            on_event=lambda: None,
        )
        self.address = PeerAddress(
            worker_id=name, incarnation=self.incarnation, control=endpoint, offers=self.receiver.offers
        )
        self._identity = b""

    def close(self) -> None:
        self.receiver.close()
        self._socket.close()

    def receive(self, kind: type[Message], timeout_s: float = WAIT_S) -> Message:
        assert self._socket.poll(int(timeout_s * 1000)), f"no {kind.__name__} comes"
        self._identity, raw = self._socket.recv_multipart()
        message: PeerRequest = peer_request.decode(raw)
        assert isinstance(message, kind), message
        return message

    def silent(self, seconds: float) -> bool:
        return not self._socket.poll(int(seconds * 1000))

    def reply(self, message: PeerReply) -> None:
        self._socket.send_multipart([self._identity, encode(message)])

    def grant(self, request: EngineRequest, lease_id: str = "lease") -> Reserved:
        blocks = list(range(-(-len(request.prompt_token_ids) // 16)))
        self.receiver.open(lease_id, [Extent(0, blocks)])
        return Reserved(
            request_id=request.request_id,
            lease_id=lease_id,
            incarnation=self.incarnation,
            block_size=16,
            extents=[Extent(0, blocks)],
            covered=0,
        )


def closing(end: PrefillEnd | DecodeEnd) -> Iterator[Any]:
    try:
        yield end
    finally:
        end.close()
