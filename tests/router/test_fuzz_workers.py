"""Fuzzes the port that workers connect to, as strangers, and as a worker with the keys."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

import msgspec
import zmq

from messaging.sockets import connect_dealer
from protocol.codec import encode
from protocol.kv_events import KvChange, Medium
from protocol.outputs import RequestTiming, TokenOutput, TransferTiming
from protocol.speculation import MethodState, SpeculationState
from protocol.worker_to_router import AbsentRequests, KvEvents, Leaving, PairState, Prefetched, StepOutput
from tests.fuzzing import altered, damaged, fuzz, say, zmq_strangers
from tests.router.router_clients import eventually, is_idle, post


def check_all_is_well(router, caplog) -> None:
    eventually(lambda: is_idle(router))
    assert post(router, max_tokens=2).status_code == 200
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [line for line in errors if "worker decode-9" not in line]  # it is refused, or lost


def test_fuzz_strangers(router, caplog):
    address = urlsplit(router.server.state.link.endpoint)

    fuzz(lambda parts: say(address.hostname, address.port, parts), zmq_strangers, examples=100)
    check_all_is_well(router, caplog)


def messages(router) -> list[bytes]:
    """Draw messages of a worker `decode-9`, beginning with its registration."""
    like = router.workers[0].register_message()
    names = {"worker_id": "decode-9", "incarnation": "x"}
    pair = PairState(peer="decode-0", transport="tcp", counters={"kv_transfer_bytes_total": 5.0})
    speculation = SpeculationState(methods=[MethodState(method="ngram", num_requests=1, acceptance=[0.5])])
    state = msgspec.structs.replace(like.state, **names, pairs=[pair], speculation=speculation)
    address = msgspec.structs.replace(like.address, **names)
    timing = RequestTiming(queue_s=0.1, transfer=TransferTiming(transport="tcp", transfer_s=0.1))
    output = TokenOutput(request_id="r", token_ids=[1], finish_reason="length", timing=timing)
    change = KvChange("stored", Medium.GPU, b"i" * 16)
    return [
        encode(msgspec.structs.replace(like, address=address, state=state)),
        encode(state),
        encode(StepOutput(**names, outputs=[output])),
        encode(KvEvents(**names, sequence=0, changes=[change])),
        encode(AbsentRequests(**names, request_ids=["r"])),
        encode(Leaving(**names)),
        encode(Prefetched(**names, request_id="r", complete=True)),
    ]


def test_fuzz_a_member(router, caplog):
    """A worker's messages affect only its own requests, and never the operators' pages."""
    caplog.set_level(logging.ERROR)  # do not keep a line for each
    sent = 0

    def check(raw: bytes) -> None:
        nonlocal sent
        dealer.send(raw)
        sent += 1
        if sent % 50 == 0:
            looks_well()

    def dropped(reason: str = "malformed") -> float:
        return router.metric("tandem_messages_dropped_total", reason=reason)

    def looks_well() -> None:
        for path in ("/metrics", "/workers", "/cluster"):
            assert router.http.get(path).status_code == 200

    before, failed = dropped(), dropped("failed")
    whole = messages(router)
    with (
        zmq.Context() as context,
        connect_dealer(context, router.keys, router.server.state.link.endpoint, "decode-9") as dealer,
    ):
        dealer.send(whole[0])
        eventually(lambda: "decode-9" in router.http.get("/workers").text)
        fuzz(check, damaged(whole) | altered(whole), examples=400)
        eventually(lambda: dropped() - before > sent / 10)
        looks_well()
        before = dropped()
        dealer.send(encode(Leaving(worker_id="decode-0", incarnation=router.workers[0].incarnation)))
        dealer.send_multipart((whole[0], whole[0]))
        eventually(lambda: dropped() == before + 2)
    assert dropped("failed") == failed
    if (known := router.server.state.registry.current_of("decode-9")) is not None:
        router.server.mark_dead(*known.key, "its test is over")
    check_all_is_well(router, caplog)
