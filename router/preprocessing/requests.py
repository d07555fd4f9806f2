"""Turns bodies into requests that can start: small bodies in the event loop, others in the preprocessor."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from protocol.errors import InvalidRequestError
from router.preprocessing.client import CpuLimitError, CrashError, Preprocessor
from router.preprocessing.tasks import BODIES, CONVERSIONS, BodyReader, Reading, ReadingDetails, TaskCall
from router.reading.prepared import EarlierResponse, Prepared
from router.reading.request_builder import Built, RequestBuilder
from router.reading.served import ServedModel

INLINE_BYTES = 2048
"""The preprocessor reads larger bodies, so that they do not delay other requests' tokens."""
FAST_INLINE_BYTES = 12 * 1024
"""The limit with `fastokens`: up to it, reading takes no longer than the way to another process and back."""
INLINE_OBJECTS = 48
"""JSON objects, such as messages: a chat template may compare each with each."""
INLINE_TEXTS = 512
"""JSON strings, each of which may be a text to tokenize."""
INLINE_TOKENS = 8192
"""The most tokens of prompts whose blocks are hashed in the event loop."""
INLINE_SEQUENCES = 64
"""The most choices that are built in the event loop."""
READ_CPU_S = 10.0
READ_CPU_S_PER_MB = 5.0
"""Even a slow tokenizer takes less."""

_decode = msgspec.msgpack.Decoder(Prepared | EarlierResponse).decode


class RequestPreparer:
    """Prepares requests. Raises `ApiError` or `InvalidRequestError`, which name the field."""

    def __init__(
        self, reader: BodyReader, builder: RequestBuilder, preprocessor: Preprocessor, is_fast: bool
    ) -> None:
        self._reader = reader
        self._builder = builder
        self._preprocessor = preprocessor
        self._inline_bytes = FAST_INLINE_BYTES if is_fast else INLINE_BYTES
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="build")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, task: str, raw: bytes, model: ServedModel, earlier: bytes | None = None) -> Reading:
        size = len(raw) + len(earlier or b"")
        is_small = size <= self._inline_bytes and raw.count(b"{") <= INLINE_OBJECTS
        if is_small and raw.count(b'"') <= 2 * INLINE_TEXTS:
            return self._reader.read(task, raw, model, earlier)
        cpu_s = READ_CPU_S + READ_CPU_S_PER_MB * size / 1e6
        details = ReadingDetails(model, earlier)
        try:
            call = TaskCall(task, cpu_s, msgspec.msgpack.encode(details))
            read = await self._preprocessor.run(call, raw)
        except CpuLimitError:
            reason = f"it takes more than {cpu_s:.1f} s of CPU time to read, the limit"
            raise InvalidRequestError(BODIES[task].main_field, reason) from None
        except CrashError as error:
            raise InvalidRequestError(BODIES[task].main_field, f"a library crashes on it ({error})") from None
        return read if task in CONVERSIONS else _decode(read)

    async def prepare(self, task: str, raw: bytes, model: ServedModel) -> Prepared:
        prepared = await self._read(task, raw, model)
        assert isinstance(prepared, Prepared)
        return prepared

    async def prepare_response(
        self, raw: bytes, model: ServedModel, earlier: bytes | None
    ) -> Prepared | EarlierResponse:
        """Prepare a request of `/v1/responses`, with the items of an earlier response."""
        prepared = await self._read("response", raw, model, earlier)
        assert not isinstance(prepared, bytes)
        return prepared

    async def convert(self, task: str, raw: bytes, model: ServedModel) -> bytes:
        answer = await self._read(task, raw, model)
        assert isinstance(answer, bytes)
        return answer

    async def build(self, prepared: Prepared, arrival: float) -> Built:
        num_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        if num_tokens <= INLINE_TOKENS and len(prepared.prompts) * prepared.n <= INLINE_SEQUENCES:
            return self._builder.build(prepared, arrival)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._builder.build, prepared, arrival)
