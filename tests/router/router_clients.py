"""Requests and waits that the tests of faults share."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx

from protocol.codec import encode
from protocol.outputs import ErrorKind, TokenOutput
from protocol.worker_to_router import StepOutput
from tests.router.fake_worker import FakeWorker
from tests.waiting import wait_until

BODY = {"prompt": "the quick brown fox", "max_tokens": 200}
eventually = partial(wait_until, timeout_s=60.0)


def post(router, **fields) -> httpx.Response:
    return router.http.post("/v1/completions", json={**BODY, **fields})


def ask_and_leave(router, arrived: Callable[[], Any], key: str = "", **fields) -> None:
    """Send a request, and disconnect before its answer as soon as `arrived()` is true."""
    content = json.dumps({**BODY, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    with socket.create_connection(("127.0.0.1", router.server.port), timeout=10) as client:
        client.sendall(f"{head}\r\n".encode() + content)
        eventually(arrived)


def answer(response: httpx.Response) -> dict:
    """Return the parts of an answer that must not depend on failures, without id and time."""
    assert response.status_code == 200, response.text
    return {key: value for key, value in response.json().items() if key not in ("id", "created")}


def events_of(router, on_first=lambda: None, **fields) -> list[dict]:
    """Return a stream's events, calling `on_first` at the first one."""
    events = []
    body = {**BODY, "stream": True, **fields}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
                if len(events) == 1:
                    on_first()
    return events


def make_pair(router, **options) -> tuple[FakeWorker, FakeWorker]:
    decode = router.add_worker("decode-0", "decode", **options)
    return router.add_worker("prefill-0", "prefill", peers={"decode-0": decode}, **options), decode


def said(worker: FakeWorker, *outputs: TokenOutput, incarnation: str | None = None) -> bytes:
    """Return a step's message of this worker, or of another incarnation of it."""
    known = incarnation or worker.incarnation
    return encode(StepOutput(worker_id=worker.worker_id, incarnation=known, outputs=list(outputs)))


def failure(request_id: str, kind: ErrorKind) -> TokenOutput:
    return TokenOutput(
        request_id=request_id, token_ids=[], finish_reason="error", error_kind=kind, error="it broke"
    )


def lose(router, worker: FakeWorker) -> None:
    """Kill a worker, and let the launcher report it."""
    router.kill(worker)
    router.server.mark_dead(worker.worker_id, worker.incarnation, "it was killed")


def emitted(router) -> list[int]:
    """Return the tokens that each live request has got."""
    return [len(request.output_token_ids) for request in router.server.state.journal]


def is_idle(router) -> bool:
    workers = router.server.state.registry
    return not len(router.server.state.journal) and all(
        worker.outstanding_requests == worker.outstanding_prefill_tokens == worker.outstanding_computed == 0
        for worker in workers
    )


def openai_client(url: str, key: str = "any", **options: Any) -> Any:
    """Return OpenAI's client, which takes long to import, and longer to read the certificate authorities."""
    import openai

    plain = httpx.Client(verify=False, timeout=60)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=plain, **options)
