"""Turns a prepared request into a generation that can start."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from protocol.config import ServeConfig
from protocol.kv_events import CacheFormat
from protocol.requests import Adapter
from protocol.sampling import SamplingParams
from router.answers.formats import OutputOptions
from router.reading.chats import Chats
from router.reading.prepared import Prepared
from router.requests.journal import Generation
from router.text.choice import Choice
from router.text.tokenizer import Tokenizer


class Built(NamedTuple):
    """A generation that is ready to start, and its output options."""

    generation: Generation
    output: OutputOptions


class RequestBuilder:
    """Builds generations. `find` returns the adapter that a request's `model` names, like
    `AdapterTable.find`. `formats` returns how the workers identify blocks, so that prompts are hashed here
    instead of in the event loop.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        chats: Chats,
        find: Callable[[str | None], Adapter | None],
        formats: Callable[[], Collection[CacheFormat]] = tuple,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._chats = chats
        self.find = find
        self._formats = formats

    def build(self, prepared: Prepared, arrival: float) -> Built:
        """Build `n` choices of each prompt, with the seeds that it would get alone. Raises `ApiError`."""
        adapter = self.find(prepared.model)
        chat = prepared.chat
        parsing = None if chat is None else self._chats.parsing(chat)
        output = OutputOptions(**msgspec.structs.asdict(prepared.output), parsing=parsing)
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
        generation = Generation(
            choices,
            arrival=arrival,
            timeout_s=self._config.request_timeout,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
            adapter=adapter,
            speculation=prepared.speculation,
            split=prepared.split,
            thinking=None if chat is None else self._chats.thinking(chat),
        )
        return Built(generation, output)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of a further choice: deterministic and well spread, in [0, 2**63)."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8, person=b"tandem-choice").digest()
    return int.from_bytes(digest, "little") >> 1
