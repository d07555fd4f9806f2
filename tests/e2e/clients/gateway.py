"""Envoy's part towards an endpoint picker: for each line of input, prints the picker's answer to one request.

A line is `{"body": ..., "subset": ..., "trailers": ...}`; the body is sent in two chunks.
"""

import json
import sys

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct


def messages(asked):
    metadata = Metadata()
    if asked["subset"] is not None:
        hints = Struct()
        hints.update({"x-gateway-destination-endpoint-subset": asked["subset"]})
        metadata.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hints)
    path = HeaderValue(key=":path", raw_value=b"/v1/completions")
    headers = ext_proc.HttpHeaders(headers=HeaderMap(headers=[path]))
    yield ext_proc.ProcessingRequest(request_headers=headers, metadata_context=metadata)
    body, ends = json.dumps(asked["body"]).encode(), not asked["trailers"]
    for chunk, last in ((body[:9], False), (body[9:], ends)):
        part = ext_proc.HttpBody(body=chunk, end_of_stream=last)
        yield ext_proc.ProcessingRequest(request_body=part)
    if asked["trailers"]:
        yield ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())
    yield ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders())
    part = ext_proc.HttpBody(body=b"answer", end_of_stream=ends)
    yield ext_proc.ProcessingRequest(response_body=part)
    if asked["trailers"]:
        yield ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers())


with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    picker = ExternalProcessorStub(channel)
    for line in sys.stdin:
        answers = picker.Process(messages(json.loads(line)), timeout=30)
        print(json.dumps([MessageToDict(answer) for answer in answers]), flush=True)
