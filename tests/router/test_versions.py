"""A worker of another version is refused with the reason, whatever else it sends."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from messaging.sockets import connect_dealer
from protocol.codec import router_to_worker
from protocol.router_to_worker import Refused
from protocol.version import PROTOCOL
from tests.router.placed import registration

ANSWER_MS = 20_000
REGISTER = msgspec.to_builtins(registration("decode-0", "a" * 16, protocol=PROTOCOL + 1, release="9.8"))


@pytest.mark.parametrize("changes", [{}, {"state": "of another kind", "model": None}])
def test_a_worker_of_another_protocol_is_refused(make_router, changes):
    router = make_router()
    with zmq.Context() as context:
        socket = connect_dealer(context, router.keys, router.server.state.link.endpoint, "decode-0")
        socket.send(msgspec.msgpack.encode(REGISTER | changes))
        assert socket.poll(ANSWER_MS)
        answer = router_to_worker.decode(socket.recv())
        socket.close()
    assert isinstance(answer, Refused) and answer.incarnation == "a" * 16
    assert f"protocol {PROTOCOL}, the worker (Tandem 9.8) {PROTOCOL + 1}" in answer.reason
    assert router.metric("tandem_messages_dropped_total", reason="refused_registration") == 1
    assert router.http.get("/workers").json()["workers"] == []
