"""The loop of a role that exists only in tests: it serves whole requests and takes over none."""

from __future__ import annotations

from decode_worker.loop import DecodeLoop
from protocol.worker_to_worker import PeerRequest


class PlainLoop(DecodeLoop):
    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        self.counters.add("dropped_messages_total")
