"""Export of requests as OpenTelemetry spans over OTLP/HTTP, imported only for `--otlp-traces-endpoint`.

A request's span is opened when the request has been read, so that its client can be told the trace. At its
end, child spans for its stages are made from recorded times. A thread sends the spans.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protocol.version import version
from router.observe.timing import span_attributes, stages
from router.requests.journal import Generation

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8192
"""Most spans that wait to be sent: those of some thousand requests. Further spans are lost."""
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """The creation and export of spans. Calls `dropped` with the reason for each lost span."""

    def __init__(self, endpoint: str, model: str, dropped: Callable[[str], None]) -> None:
        self.model = model
        self._dropped = dropped
        self._exporter = _CountingExporter(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S), dropped)
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "tandem")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=MAX_QUEUED_SPANS))
        self.tracer = self._provider.get_tracer("tandem", version())
        self._num_queued = 0
        self._is_full = False

    def start_trace(self, headers: Mapping[str, str], arrival: float) -> RequestTrace:
        """Open a request's span, the child of a valid `traceparent`. `arrival` is monotonic."""
        return RequestTrace(self, _propagator.extract(headers, Context()), arrival)

    def has_room(self, count: int) -> bool:
        """Return whether `count` spans can be queued. If not, they count as lost."""
        is_full = self._num_queued - self._exporter.num_taken + count > MAX_QUEUED_SPANS
        if is_full and not self._is_full:
            logger.warning("spans are lost: %d wait to be sent", self._num_queued - self._exporter.num_taken)
        self._is_full = is_full
        for _ in range(count if is_full else 0):
            self._dropped("queue_full")
        self._num_queued += 0 if is_full else count
        return not is_full

    def close(self) -> None:
        """Send the queued spans, for at most `CLOSE_TIMEOUT_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class RequestTrace:
    """The span of one HTTP request. `traceparent`: its position in the trace, for the client."""

    def __init__(self, tracing: Tracing, parent: Context, arrival: float) -> None:
        self._tracing = tracing
        self._zero_ns = time.time_ns() - int(time.monotonic() * 1e9)
        began = self._clock_ns(arrival)
        self._span = tracing.tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=began)
        self._context = set_span_in_context(self._span, Context())
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context)
        self.traceparent = carrier["traceparent"].encode()

    def end(self, generation: Generation, request_id: str) -> None:
        """End the span with the answer or an error, unless the parent does not sample its trace."""
        span = self._span
        if not span.is_recording():
            return
        found = stages(generation)
        if not self._tracing.has_room(len(found) + 1):
            return
        for stage in found:
            child = self._tracing.tracer.start_span(
                stage.name, self._context, attributes=stage.attributes, start_time=self._clock_ns(stage.began)
            )
            child.end(self._clock_ns(stage.ended))
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.response.model", self._tracing.model)
        span.set_attributes(span_attributes(generation))
        if generation.error is not None:
            span.set_status(Status(StatusCode.ERROR, generation.error.message))
        span.end(self._clock_ns(time.monotonic()))

    def _clock_ns(self, monotonic_s: float) -> int:
        return self._zero_ns + int(monotonic_s * 1e9)


class _CountingExporter(SpanExporter):
    """An exporter that counts spans that could not be sent. `num_taken`: spans that left the queue."""

    def __init__(self, exporter: SpanExporter, dropped: Callable[[str], None]) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.num_taken += len(spans)
            if result is not SpanExportResult.SUCCESS:
                for _ in spans:
                    self._dropped("export_failed")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
