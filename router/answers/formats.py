"""Answers as JSON, whole or as chunks of a stream. The constant parts are encoded once.

All are generated in pieces, since a client may ask for long ones: see `router.requests.slices`.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import msgspec
from msgspec import Raw

from protocol.outputs import TokenLogprobs, paged_logprobs
from router.errors import ApiError
from router.parsing.formats import Parsing
from router.requests.slices import json_members, json_pieces
from router.text.choice import Choice, ChoiceDelta, Prompt
from router.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Value for minus infinity, which JSON cannot express."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def token_name(tokenizer: Tokenizer, token_id: int, prefix: str = "bytes:") -> str:
    """Return the token's text, or its bytes spelled out if they are not whole characters."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer, choice: Choice, delta: ChoiceDelta, num_top: int, echo: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a completion; if this delta echoes the prompt, after the prompt's.

    The alternatives at a position include the token itself.
    """
    prompt_echo = choice.prompt.echo if echo else None
    prompt_ids = choice.prompt.token_ids if prompt_echo is not None else []
    offsets = prompt_echo.offsets if prompt_echo is not None else []

    def names() -> Iterator[str]:
        return (token_name(tokenizer, token_id) for token_id in chain(prompt_ids, delta.token_ids))

    def entries() -> Iterator[TokenLogprobs | None]:
        known = chain(paged_logprobs(choice.prompt_logprobs), repeat(None))
        return chain(islice(known, len(prompt_ids)), delta.all_logprobs())

    def chosen(entry: TokenLogprobs | None) -> float | None:
        return None if entry is None else finite(entry.logprob)

    def alternatives(name: str, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        found = {token_name(tokenizer, other): finite(logprob) for other, logprob in _top(entry, num_top)}
        found.setdefault(name, finite(entry.logprob))
        return found

    return {
        "text_offset": chain(offsets, delta.offsets),
        "token_logprobs": map(chosen, entries()),
        "tokens": names(),
        "top_logprobs": map(alternatives, names(), entries()),
    }


def chat_logprobs(tokenizer: Tokenizer, delta: ChoiceDelta, num_top: int) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def describe(token_id: int, entry: TokenLogprobs | None) -> dict[str, Any]:
        assert entry is not None
        item = _chat_token(tokenizer, token_id, entry.logprob)
        top = [_chat_token(tokenizer, other, logprob) for other, logprob in _top(entry, num_top)]
        return {**item, "top_logprobs": top}

    return {"content": map(describe, delta.token_ids, delta.all_logprobs()), "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, choice: Choice, num_top: int
) -> Iterator[dict[str, dict[str, Any]] | None]:
    """Yield vLLM's `prompt_logprobs`: for each prompt token, itself and the alternatives by token id."""
    for token_id, entry in zip(choice.prompt.token_ids, paged_logprobs(choice.prompt_logprobs), strict=False):
        if entry is None:
            yield None
            continue
        ranked = [(token_id, entry.logprob, entry.rank)]
        others = enumerate(_top(entry, num_top), start=1)
        ranked += [(other, logprob, rank) for rank, (other, logprob) in others]
        yield {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_name(tokenizer, other),
            }
            for other, logprob, rank in ranked
        }


def _top(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    return zip(entry.top_token_ids[:num_top], entry.top_logprobs[:num_top], strict=True)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    name, raw = token_name(tokenizer, token_id, prefix=""), list(tokenizer.token_bytes(token_id))
    return {"token": name, "logprob": finite(logprob), "bytes": raw}


DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode
Fields = dict[str, Any]


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the answer that the client asks for. `num_top` None: no log-probabilities."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    only_prompt: bool = False
    num_top: int | None = None
    num_prompt_top: int | None = None
    return_token_ids: bool = False
    return_timing: bool = False
    skip_special_tokens: bool = True
    parsing: Parsing | None = None
    """Finds tool calls and reasoning in a chat's answer; None: the whole answer is content."""

    @property
    def keep_details(self) -> bool:
        """Whether token ids and their log-probabilities are part of the answer."""
        return self.num_top is not None or self.return_token_ids

    @property
    def only_text(self) -> bool:
        """Whether most chunks of a stream contain only text."""
        return not (self.keep_details or self.return_timing or self.continuous_usage)


def usage(choices: Sequence[Choice], only_prompt: bool = False) -> Fields:
    """Return the answer's usage. Each prompt counts once, however many choices it has.

    As in OpenAI's API, draft tokens from the client's prediction that were rejected are reported separately;
    they do not count as completion tokens.
    """
    firsts = list({id(choice.prompt): choice for choice in reversed(choices)}.values())
    prompt_tokens = sum(len(choice.prompt.token_ids) for choice in firsts)
    completion_tokens = 0 if only_prompt else sum(choice.num_tokens for choice in choices)
    predicted = sum(choice.predicted_tokens for choice in choices)
    accepted = sum(choice.accepted_predicted for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        },
    }


class AnswerWriter(abc.ABC):
    """The writer of one request's answer."""

    @abc.abstractmethod
    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterable[bytes]:
        """Generate the whole answer. `timing`: a field to add to it, if any."""

    def failed(self, choices: Sequence[Choice], error: ApiError) -> Iterable[bytes]:
        """Generate the body of an answer that failed."""
        return [error.body()]

    def completed(self, choices: Sequence[Choice], timing: Fields) -> Iterable[bytes]:
        """Generate the part of the answer before `keep`, after all choices are complete."""
        return ()

    async def keep(self) -> None:  # noqa: B027
        """Store the data for later requests, before the client sees the end of the answer."""


class StreamedAnswer(AnswerWriter):
    """The writer of an answer that can also be sent as server-sent events."""

    @abc.abstractmethod
    def chunk(self, choice: Choice) -> Iterable[bytes]:
        """Generate the events for a choice's new output."""

    @abc.abstractmethod
    def last_chunk(self, choices: Sequence[Choice], timing: Fields) -> Iterable[bytes]:
        """Generate the last events, after all choices are complete."""

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """Generate the last event of a stream that fails after its beginning."""
        return [b"data: " + error.body() + b"\n\n"]


class AnswerFormat(StreamedAnswer):
    """The writer of answers in one of OpenAI's formats."""

    stream_object: str
    whole_object: str
    id_prefix: str
    before_text: bytes
    after_text: bytes
    """JSON of a choice before and after its text, in a chunk that contains only text."""

    def __init__(self, tokenizer: Tokenizer, model: str, request_id: str, options: OutputOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._begun: dict[int, bytes] = {}
        """Start of a text-only chunk by choice that has begun; empty if chunks contain more than text."""
        self._encoded_ids: dict[int, Raw] = {}
        self._head = {
            "id": self.id_prefix + request_id,
            "object": self.stream_object if options.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_start = b"data: " + _json(self._head)[:-1] + b',"choices":['
        self._chunk_end = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._text_end = self.after_text + self._chunk_end

    def chunk(self, choice: Choice) -> Iterable[bytes]:
        before_text = self._begun.get(choice.index)
        if before_text and choice.finish_reason is None:
            return (before_text + _json(choice.take_text()) + self._text_end,)
        if before_text is None:
            start = self._chunk_start + self.before_text % choice.index
            self._begun[choice.index] = start if self._options.only_text else b""
        return self._full_chunk(choice, choice.take_delta(), before_text is None)

    @abc.abstractmethod
    def _full_chunk(self, choice: Choice, delta: ChoiceDelta, first: bool) -> Iterator[bytes]:
        """Yield a chunk with all current fields of the choice."""

    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        return self._whole(self._head, choices, timing)

    def failed(self, choices: Sequence[Choice], error: ApiError) -> Iterator[bytes]:
        """Yield the error with the incomplete answer, whose `finish_reason` is "error"."""
        head = {**self._head, "object": self.whole_object}
        return self._whole(head, choices, {"error": error.detail})

    def last_chunk(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        used = {"usage": usage(choices, self._options.only_prompt)} if self._options.include_usage else {}
        if fields := {**used, **timing}:
            yield self._chunk_start + b"]," + _json(fields)[1:] + b"\n\n"
        yield DONE

    def _whole(self, head: Fields, choices: Sequence[Choice], extras: Fields) -> Iterator[bytes]:
        yield _json(head)[:-1] + b',"choices":['
        for number, choice in enumerate(choices):
            yield b"," if number else b""
            yield from self._whole_choice(choice)
        fields = {"usage": usage(choices, self._options.only_prompt), **self._about_prompt(choices), **extras}
        yield b"],"
        yield from json_members(fields)

    @abc.abstractmethod
    def _whole_choice(self, choice: Choice) -> Iterator[bytes]:
        """Yield one choice of the whole answer."""

    def _about_prompt(self, choices: Sequence[Choice]) -> Fields:
        return {}

    def _event(
        self, choice: Choice, body: Fields, *, is_short: bool, extras: Fields | None = None
    ) -> Iterator[bytes]:
        """Yield one event about a choice. `extras`: further top-level fields."""
        fields = dict(extras or {})
        if self._options.continuous_usage:
            fields["usage"] = usage([choice], self._options.only_prompt)
        yield self._chunk_start
        yield from json_pieces(body, is_short=is_short)
        if not fields:
            yield self._chunk_end
            return
        yield b"],"
        yield from json_members(fields)
        yield b"\n\n"

    def _common(self, choice: Choice, delta: ChoiceDelta) -> Fields:
        """Return the fields that choices of completions and chats share."""
        fields: Fields = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self._options.return_token_ids:
            fields["token_ids"] = delta.token_ids
        if self._options.return_timing:
            fields["spans"] = delta.spans
        return fields

    def _of_prompt(self, choice: Choice) -> Fields:
        """Return vLLM's fields about the prompt: in each choice of completions, at top level for chats."""
        fields: Fields = {}
        if self._options.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_ids(choice.prompt)
        if self._options.num_prompt_top is not None:
            top = self._options.num_prompt_top
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice, top)
        return fields

    def _prompt_ids(self, prompt: Prompt) -> Raw:
        """Return the prompt's token ids, encoded once for all choices."""
        known = self._encoded_ids.get(id(prompt))
        if known is None:
            known = self._encoded_ids[id(prompt)] = Raw(_json(prompt.token_ids))
        return known


class CompletionFormat(AnswerFormat):
    """The format of `/v1/completions`."""

    stream_object = whole_object = "text_completion"
    id_prefix = "cmpl-"
    before_text = b'{"index":%d,"text":'
    after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def _full_chunk(self, choice: Choice, delta: ChoiceDelta, first: bool) -> Iterator[bytes]:
        return self._event(choice, self._choice(choice, delta, first), is_short=delta.is_short and not first)

    def _whole_choice(self, choice: Choice) -> Iterator[bytes]:
        return json_pieces(self._choice(choice, choice.take_delta(), True))

    def _choice(self, choice: Choice, delta: ChoiceDelta, first: bool) -> Fields:
        options = self._options
        echo = options.echo and first
        if options.only_prompt:
            delta = ChoiceDelta()
        text = delta.text
        if echo and choice.prompt.echo is not None:
            text = choice.prompt.echo.text + text
        logprobs = None
        if options.num_top is not None:
            logprobs = completion_logprobs(self._tokenizer, choice, delta, options.num_top, echo)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            **self._common(choice, delta),
            **(self._of_prompt(choice) if first else {}),
        }


class ChatFormat(AnswerFormat):
    """The format of `/v1/chat/completions`."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"
    before_text = b'{"index":%d,"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null}'

    def _whole_choice(self, choice: Choice) -> Iterator[bytes]:
        delta = choice.take_delta()
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return json_pieces({"index": choice.index, "message": message, **self._details(choice, delta)})

    def _about_prompt(self, choices: Sequence[Choice]) -> Fields:
        return self._of_prompt(choices[0])

    def _full_chunk(self, choice: Choice, delta: ChoiceDelta, first: bool) -> Iterator[bytes]:
        if first:
            yield from self._role(choice)
        body = {"index": choice.index, "delta": {"content": delta.text}, **self._details(choice, delta)}
        yield from self._event(choice, body, is_short=delta.is_short)

    def _role(self, choice: Choice) -> Iterator[bytes]:
        delta = {"role": "assistant", "content": ""}
        role = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, role, is_short=True, extras=self._of_prompt(choice))

    def _details(self, choice: Choice, delta: ChoiceDelta) -> Fields:
        num_top = self._options.num_top
        logprobs = None if num_top is None else chat_logprobs(self._tokenizer, delta, num_top)
        return {"logprobs": logprobs, **self._common(choice, delta)}
