"""An endpoint picker: a gateway asks it which of several Tandem servers answers a request.

    pip install grpcio xds-protos httpx
    python examples/endpoint_picker.py 127.0.0.1:9002 10.0.0.1:8000 10.0.0.2:8000

The first address is the picker's own, which a gateway asks without TLS. The servers run with `--metric-names
vllm`. Envoy, which most gateways are, asks by its ext_proc protocol, with bodies in the mode
FULL_DUPLEX_STREAMED, and gets its answer by the endpoint picker protocol of the Gateway API's inference
extension. That project's picker does more; this one shows what one reads of Tandem.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import httpx
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

DESTINATION = "x-gateway-destination-endpoint"
SCRAPE_EVERY_S = 0.1


@dataclass
class Load:
    """A server's load by its latest metrics, and by the requests that it was given since."""

    waiting: float
    kv_usage: float
    running: float
    adapters: Sequence[str]

    @classmethod
    def read(cls, text: str) -> Load:
        names = ("num_requests_waiting", "kv_cache_usage_perc", "num_requests_running")
        values = (re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names)
        numbers = [float(value[1]) for value in values if value]
        loaded = re.search(r'^vllm:lora_requests_info{.*running_lora_adapters="([^"]*)"', text, re.MULTILINE)
        return cls(*numbers, adapters=loaded[1].split(",") if loaded else ())

    def rank(self, model: str) -> tuple[bool, float, float, float]:
        """Return the lower the better."""
        return model not in self.adapters, self.waiting, self.kv_usage, self.running


class Picker(ext_proc_grpc.ExternalProcessorServicer):
    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        """The servers that are ready."""

    async def watch(self, endpoint: str) -> None:
        """Read a server's readiness and load, again and again."""
        async with httpx.AsyncClient(base_url=f"http://{endpoint}", timeout=5) as http:
            while True:
                try:
                    (await http.get("/ready")).raise_for_status()
                    self.loads[endpoint] = Load.read((await http.get("/metrics")).text)
                except (httpx.HTTPError, TypeError):  # a TypeError: metrics are missing
                    self.loads.pop(endpoint, None)
                await asyncio.sleep(SCRAPE_EVERY_S)

    def pick(self, model: str, among: Sequence[str] | None) -> str | None:
        ready = [each for each in self.loads if among is None or each in among]
        chosen = min(ready, key=lambda endpoint: self.loads[endpoint].rank(model), default=None)
        if chosen:
            self.loads[chosen].running += 1
        return chosen

    async def Process(  # noqa: N802  (the name that gRPC calls)
        self, messages: AsyncIterator[ext_proc.ProcessingRequest], context: object
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """Answer Envoy's messages on one HTTP request. The request's headers wait for its body, which names
        the model; all else goes on unchanged. Before trailers no part says that it is the last one.
        """
        among, chunks = None, []
        async for message in messages:
            part = message.WhichOneof("request")
            if part == "request_headers":
                among = subset(message)
            if part == "request_body":
                chunks.append(message.request_body)
            if part == "request_trailers" or (
                part in ("request_headers", "request_body") and getattr(message, part).end_of_stream
            ):
                chosen = self.pick(model_of(b"".join(chunk.body for chunk in chunks)), among)
                if chosen is None:
                    yield refusal()
                    return
                yield destination(chosen)
                for chunk in chunks:
                    yield ext_proc.ProcessingResponse(request_body=unchanged(chunk))
            elif part == "response_headers":
                yield ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
            elif part == "response_body":
                yield ext_proc.ProcessingResponse(response_body=unchanged(message.response_body))
            if part in ("request_trailers", "response_trailers"):
                yield ext_proc.ProcessingResponse(**{part: ext_proc.TrailersResponse()})


def subset(message: ext_proc.ProcessingRequest) -> list[str] | None:
    """Return the endpoints that the gateway allows, or None if it allows all."""
    hints = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    key = f"{DESTINATION}-subset"
    return list(hints[key]) if key in hints else None


def model_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["model"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""  # any server says what is wrong with it


def destination(endpoint: str) -> ext_proc.ProcessingResponse:
    """Return an answer that names the endpoint in a header, in place of a client's, and in metadata."""
    header = HeaderValueOption(
        header=HeaderValue(key=DESTINATION, raw_value=endpoint.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    common = ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(set_headers=[header]), clear_route_cache=True
    )
    metadata = Struct()
    metadata.update({"envoy.lb": {DESTINATION: endpoint}})
    headers = ext_proc.HeadersResponse(response=common)
    return ext_proc.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata)


def refusal() -> ext_proc.ProcessingResponse:
    refused = ext_proc.ImmediateResponse(status=HttpStatus(code=503), body=b"no server is ready")
    return ext_proc.ProcessingResponse(immediate_response=refused)


def unchanged(chunk: ext_proc.HttpBody) -> ext_proc.BodyResponse:
    same = ext_proc.StreamedBodyResponse(body=chunk.body, end_of_stream=chunk.end_of_stream)
    mutation = ext_proc.BodyMutation(streamed_response=same)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


async def main() -> None:
    address, *endpoints = sys.argv[1:]
    picker, server = Picker(), grpc.aio.server()
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    print("picking on port", server.add_insecure_port(address), flush=True)
    await server.start()
    await asyncio.gather(*map(picker.watch, endpoints))


if __name__ == "__main__":
    asyncio.run(main())
