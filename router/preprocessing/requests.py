"""The way from bodies to generations: small bodies in the event loop, others in the preprocessor."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec

from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from protocol.kv_events import CacheFormat
from protocol.requests import Adapter
from protocol.sampling import SamplingParams
from router.preprocessing.client import CpuLimitError, CrashError, Preprocessor
from router.preprocessing.tasks import BODIES, CONVERSIONS, Reading, ReadingDetails, TaskCall, read_body
from router.reading.chats import Chats
from router.reading.prepared import EarlierResponse, Prepared, ServedModel
from router.reading.request_reader import RequestReader
from router.requests.journal import Generation
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer

INLINE_BYTES = 2048
"""Largest body that is read in the event loop: reading a larger one would delay other requests' tokens."""
FAST_INLINE_BYTES = 12 * 1024
"""Like `INLINE_BYTES`, with `fastokens`: up to it, reading takes no longer than a trip to a process."""
INLINE_OBJECTS = 48
"""Most JSON objects, such as messages: a chat template may compare each with each."""
INLINE_TEXTS = 512
"""Most JSON strings, each of which may be a text to tokenize."""
INLINE_TOKENS = 8192
"""Most prompt tokens whose blocks are hashed in the event loop."""
INLINE_SEQUENCES = 64
"""Most choices that are built in the event loop."""
READ_CPU_S = 10.0
READ_CPU_S_PER_MB = 5.0
"""CPU time limit per MB; even a slow tokenizer needs less."""

_decode = msgspec.msgpack.Decoder(Prepared | EarlierResponse).decode


class RequestPreparer:
    """The reader and builder of requests. Raises `ApiError` or `InvalidRequestError` that names the field.

    `find` returns the adapter that a request's `model` names, like `AdapterTable.find`. `formats` returns the
    workers' formats of block identities, so that prompts are hashed here and not when they are placed.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        chats: Chats,
        preprocessor: Preprocessor,
        find: Callable[[str | None], Adapter | None],
        formats: Callable[[], Collection[CacheFormat]],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._chats = chats
        self._reader = RequestReader(config, tokenizer, chats)
        self._preprocessor = preprocessor
        self._find = find
        self._formats = formats
        self._inline_bytes = FAST_INLINE_BYTES if tokenizer.is_fast else INLINE_BYTES
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="build")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, task: str, raw: bytes, model: ServedModel, earlier: bytes | None = None) -> Reading:
        """Read a task's body. `earlier`: items of the response that a body of `/v1/responses` continues."""
        size = len(raw) + len(earlier or b"")
        is_small = size <= self._inline_bytes and raw.count(b"{") <= INLINE_OBJECTS
        if is_small and raw.count(b'"') <= 2 * INLINE_TEXTS:
            return read_body(self._reader, task, raw, model, earlier)
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

    async def build(self, prepared: Prepared, arrival: float) -> Generation:
        """Return a generation that is ready to start. Raises `ApiError`."""
        num_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        if num_tokens <= INLINE_TOKENS and len(prepared.prompts) * prepared.n <= INLINE_SEQUENCES:
            return self._build(prepared, arrival)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._build, prepared, arrival)

    def _build(self, prepared: Prepared, arrival: float) -> Generation:
        """Build `n` choices of each prompt, with the same seeds as if it were alone. Raises `ApiError`."""
        adapter = self._find(prepared.model)
        output, parsing = prepared.output, prepared.output.parsing
        skip = output.skip_special_tokens
        keep = frozenset() if parsing is None else parsing.markers
        choices: list[tuple[Choice, SamplingParams]] = []
        for each in prepared.prompts:
            prompt = each.unpacked()
            params = msgspec.structs.replace(prepared.params, max_tokens=each.max_tokens)
            for cache in self._formats():
                prompt.blocks(cache, prepared.cache_salt, adapter)
            offset = 0 if prompt.echo is None else len(prompt.echo.text)
            for index in range(prepared.n):
                choice = Choice(
                    len(choices),
                    prompt,
                    self._tokenizer.detokenizer(prompt.token_ids, skip, keep),
                    stop=prepared.stop,
                    include_stop=prepared.include_stop,
                    min_tokens=params.min_tokens,
                    keep_details=output.keep_details,
                    offset=offset,
                )
                seed = params.seed if index == 0 else derived_seed(params.seed, index)
                choices.append((choice, msgspec.structs.replace(params, seed=seed)))
        return Generation(
            choices,
            arrival=arrival,
            timeout_s=self._config.request_timeout,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
            adapter=adapter,
            speculation=prepared.speculation,
            split=prepared.split,
            thinking=self._chats.thinking(prepared.thinking_budget, parsing),
        )


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`: deterministic and well spread, in [0, 2**63)."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8, person=b"tandem-choice").digest()
    return int.from_bytes(digest, "little") >> 1
