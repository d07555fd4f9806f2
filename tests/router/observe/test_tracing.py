"""Requests become spans at a real collector, over OTLP by HTTP."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

import router.observe.tracing as tracing
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from tests.router.router_clients import BODY, eventually, lose, make_pair, post

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Collector:
    """Answers with `status`, and not at all while `hold` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.hold = threading.Event()
        self.release = threading.Event()
        self.spans: list[Span] = []
        self.services: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if collector.hold.is_set():
                    collector.release.wait(10)
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.take(ExportTraceServiceRequest.FromString(raw))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True)
        self._thread.start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource in message.resource_spans:
            values = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(values["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(collector, make_router):
    return make_router(otlp_traces_endpoint=collector.endpoint)


def wait_for_spans(collector: Collector, count: int) -> dict[str, Span]:
    """Wait for the spans and return all by name."""
    eventually(lambda: len(collector.spans) >= count)
    return {span.name: span for span in collector.spans}


def values_of(span: Span) -> dict:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def dropped(router, reason: str) -> float:
    return router.metric("tandem_trace_spans_dropped_total", reason=reason)


def test_a_request_is_a_span_with_its_stages_as_children(collector, traced):
    make_pair(traced)
    headers = {"traceparent": PARENT, "x-request-id": "the-id"}
    answer = traced.http.post("/v1/completions", json={**BODY, "max_tokens": 20}, headers=headers)
    assert answer.status_code == 200
    spans = wait_for_spans(collector, 6)
    root = spans.pop("llm_request")
    assert collector.services == {"tandem"}
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01"
    assert root.kind == Span.SPAN_KIND_SERVER and root.status.code == Status.STATUS_CODE_UNSET
    values = values_of(root)
    assert values["gen_ai.request.id"] == "the-id" and values["gen_ai.response.model"] == "test-model"
    assert values["gen_ai.usage.completion_tokens"] == 20 and values["tandem.decode_steps"] == 19
    assert 0 < values["gen_ai.latency.time_to_first_token"] < values["gen_ai.latency.e2e"] < 5
    assert set(spans) == {"prepare", "placement", "worker_queue", "prefill", "decode"}
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    assert spans["prepare"].start_time_unix_nano == root.start_time_unix_nano
    prefill = spans["prefill"]
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == pytest.approx(2e6, abs=1e3)
    placed = values_of(spans["placement"])
    assert placed["tandem.mode"] == "split"
    assert (placed["tandem.prefill_worker"], placed["tandem.decode_worker"]) == ("prefill-0", "decode-0")


@pytest.mark.parametrize("given", [None, f"00-{TRACE_ID}-{SPAN_ID}", "x" * 4000])
def test_a_malformed_traceparent_is_ignored(collector, traced, given):
    traced.add_worker()
    headers = {} if given is None else {"traceparent": given}
    answer = traced.http.post("/v1/completions", json={**BODY, "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200
    root = wait_for_spans(collector, 6)["llm_request"]
    named = f"00-{root.trace_id.hex()}-{root.span_id.hex()}-"
    assert root.parent_span_id == b"" and root.trace_id.hex() not in (TRACE_ID, "0" * 32)
    assert answer.headers["traceparent"].startswith(named)


def test_an_unsampled_parent_is_not_recorded(collector, traced):
    traced.add_worker()
    body = {**BODY, "max_tokens": 2}
    answer = traced.http.post("/v1/completions", json=body, headers={"traceparent": PARENT[:-1] + "0"})
    assert answer.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert answer.headers["traceparent"].endswith("-00")
    assert post(traced, max_tokens=2).status_code == 200
    assert len({span.trace_id for span in wait_for_spans(collector, 6).values()}) == 1
    assert TRACE_ID not in {span.trace_id.hex() for span in collector.spans}


def test_a_request_that_fails_is_an_error(collector, traced, pool):
    worker = traced.add_worker()
    worker.stall_after = 3
    running = pool.submit(post, traced)
    eventually(lambda: worker.jobs and all(job.sent == 3 for job in worker.jobs.values()))
    lose(traced, worker)
    assert running.result(20).status_code == 502
    spans = wait_for_spans(collector, 3)
    assert set(spans) == {"llm_request", "prepare", "earlier"}
    root = spans["llm_request"]
    assert root.status.code == Status.STATUS_CODE_ERROR and "decode-0" in root.status.message
    assert running.result().headers["traceparent"].split("-")[1] == root.trace_id.hex()


def test_a_refusing_collector_costs_only_spans(collector, traced, monkeypatch):
    """Even more of them than the queue may hold."""
    monkeypatch.setattr(tracing, "MAX_QUEUED_SPANS", 12)
    traced.add_worker()
    collector.status = 400
    for count in (1, 2, 3):
        assert post(traced, max_tokens=2).status_code == 200
        eventually(lambda count=count: dropped(traced, "export_failed") == 6 * count)
    collector.status = 200
    assert post(traced, max_tokens=2).status_code == 200
    assert len(wait_for_spans(collector, 6)) == 6 and dropped(traced, "queue_full") == 0


def test_a_hanging_collector_costs_only_spans(collector, traced, monkeypatch):
    """The queue is bounded, further spans are counted, and the server still ends."""
    traced.add_worker()
    monkeypatch.setattr(tracing, "MAX_QUEUED_SPANS", 12)
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.1)
    collector.hold.set()
    for _ in range(5):
        assert post(traced, max_tokens=2).status_code == 200
    eventually(lambda: dropped(traced, "queue_full") == 3 * 6)
    traced.http.close()
    traced.server.stop()
    traced.thread.join(3)
    assert not traced.thread.is_alive()
    collector.release.set()  # or its spans fail while another test looks for errors
    eventually(lambda: not any(thread.name.startswith("Otel") for thread in threading.enumerate()))


def test_a_missing_package_names_the_extra(make_router, monkeypatch, collector):
    monkeypatch.delitem(sys.modules, "router.observe.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint: .*tandem-serve\[otel\]"):
        make_router(otlp_traces_endpoint=collector.endpoint)
    assert ServeConfig().otlp_traces_endpoint is None
