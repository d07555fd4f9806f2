"""Requests for embeddings, scores and rankings: their bodies, reading and answers."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from protocol.errors import InvalidRequestError
from protocol.fields import doc
from router.answers.formats import AnswerWriter, Fields, usage
from router.decoding import decode_body, decode_prompts, refuse_unsupported
from router.openai_types import PROMPTS, PoolingBody, Unsupported, absent
from router.reading.prepared import Prepared, PreparedRanking, ServedModel
from router.reading.request_reader import RequestReader
from router.requests.slices import json_pieces
from router.text.choice import Choice


class PoolingAnswer(AnswerWriter, ABC):
    """The writer of one request's answer."""

    def __init__(self, prepared: Prepared, model: str, request_id: str) -> None:
        self._prepared = prepared
        self._head = {"id": request_id, "object": "list", "created": int(time.time()), "model": model}

    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        data = self._data([choice.embedding or b"" for choice in choices])
        return json_pieces({**self._head, "data": data, **_about(choices, timing)})

    @abstractmethod
    def _data(self, vectors: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """Yield the items of the answer's `data` from the vectors of the texts."""


class EmbeddingAnswer(PoolingAnswer):
    """The writer of answers of `/v1/embeddings`."""

    def _data(self, vectors: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        as_base64 = self._prepared.as_base64
        for index, vector in enumerate(vectors):
            embedding = base64.b64encode(vector).decode() if as_base64 else _values(vector)
            yield {"object": "embedding", "index": index, "embedding": embedding}


class ScoreAnswer(PoolingAnswer):
    """The writer of answers of `/score`."""

    def _data(self, vectors: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        for index, score in enumerate(_scores(vectors, self._prepared.num_first)):
            yield {"object": "score", "index": index, "score": score}


class RankingAnswer(AnswerWriter):
    """The writer of answers of `/v1/rerank`."""

    def __init__(self, prepared: Prepared, model: str, request_id: str) -> None:
        assert prepared.ranking is not None
        self._ranking = prepared.ranking
        self._head = {"id": request_id, "model": model}

    def response(self, choices: Sequence[Choice], timing: Fields) -> Iterator[bytes]:
        scores: list[float] = []
        for score in _scores([choice.embedding or b"" for choice in choices], 1):
            scores.append(score)
            yield b""
        yield from json_pieces({**self._head, "results": self._results(scores), **_about(choices, timing)})

    def _results(self, scores: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield the best results, ties in the order of the documents."""
        documents = self._ranking.documents
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        for index in best[: self._ranking.top_n]:
            found = {"index": index, "relevance_score": scores[index]}
            yield {**found, "document": {"text": documents[index]}} if documents else found


def read_embeddings(reader: RequestReader, raw: bytes, model: ServedModel) -> Prepared:
    """Read a request for embeddings. Raises `ApiError` or `InvalidRequestError`."""
    body = decode_body(raw, EmbeddingBody)
    refuse_unsupported(body)
    if body.encoding_format not in (None, "float", "base64"):
        reason = f"must be 'float' or 'base64', got {body.encoding_format!r}"
        raise InvalidRequestError("encoding_format", reason)
    sources = decode_prompts(bytes(body.input), _check_number, "input")
    prepared = reader.embeddings(body, [("input", source) for source in sources], model)
    return msgspec.structs.replace(prepared, as_base64=body.encoding_format == "base64")


def read_score(reader: RequestReader, raw: bytes, model: ServedModel) -> Prepared:
    """Read a request for scores. Raises `ApiError` or `InvalidRequestError`."""
    body = decode_body(raw, ScoreBody)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        limits = f"one text, or as many as text_2, {len(second)}; got {len(first)}"
        raise InvalidRequestError("text_1", limits)
    sources = [("text_1", text) for text in first] + [("text_2", text) for text in second]
    return msgspec.structs.replace(reader.embeddings(body, sources, model), num_first=len(first))


def read_ranking(reader: RequestReader, raw: bytes, model: ServedModel) -> Prepared:
    """Read a request for a ranking. Raises `ApiError` or `InvalidRequestError`."""
    body = decode_body(raw, RerankBody)
    refuse_unsupported(body)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    sources = [("query", body.query)] + [("documents", text) for text in documents]
    shown = [] if body.return_documents is False else documents
    ranking = PreparedRanking(body.top_n or len(documents), shown)
    return msgspec.structs.replace(reader.embeddings(body, sources, model), ranking=ranking)


def _check_number(number: int) -> None:
    if number > MAX_INPUTS:
        raise InvalidRequestError("input", f"at most {MAX_INPUTS} texts, got {number}")


def _scores(vectors: Sequence[bytes], num_first: int) -> Iterator[float]:
    """Yield the dot product of each pair of a first and a second text. A single first text pairs with all."""
    second = map(_values, vectors[num_first:])
    first = repeat(_values(vectors[0])) if num_first == 1 else map(_values, vectors[:num_first])
    for pair in zip(second, first, strict=False):
        yield sum(a * b for a, b in zip(*pair, strict=True))


def _about(choices: Sequence[Choice], timing: Fields) -> Fields:
    used = usage(choices, only_prompt=True)
    return {"usage": {name: used[name] for name in ("prompt_tokens", "total_tokens")}, **timing}


def _values(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


MAX_INPUTS = 2048
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingBody(PoolingBody, kw_only=True):
    """Turn texts into vectors of length one."""

    input: Annotated[
        Raw,
        Meta(
            description="A text, a list of token ids, or a list of either, at most 2048.",
            extra_json_schema={"anyOf": PROMPTS},
        ),
    ] = absent()
    encoding_format: Annotated[str | None, doc("`float`, the default, or `base64`: float32's bytes.")] = None
    dimensions: Unsupported = absent()


class ScoreBody(PoolingBody, kw_only=True):
    """Compare texts: the cosine of the angle between their vectors."""

    text_1: Annotated[Texts, doc("One text for all of `text_2`, or as many texts.")]
    text_2: Annotated[Texts, doc("One or several.")]


class Document(msgspec.Struct, kw_only=True):
    """A document that is compared with the query."""

    text: Annotated[str, doc("The document's text.")]


class RerankBody(PoolingBody, kw_only=True):
    """Sort documents by their likeness to a query: the cosine of the angle between their vectors."""

    query: Annotated[str, doc("The text that the documents are compared with.")]
    documents: Annotated[
        Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)], doc("Texts.")
    ]
    top_n: Annotated[Annotated[int, Meta(ge=1)] | None, doc("Most results; default: all.")] = None
    return_documents: Annotated[bool | None, doc("Repeat the documents' texts; default: true.")] = None
    rank_fields: Unsupported = absent()
    max_tokens_per_doc: Unsupported = absent()
