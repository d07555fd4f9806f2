"""The bodies of `/v1/embeddings`, `/score` and `/v1/rerank`, as OpenAI, vLLM, Jina and Cohere define them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from protocol.fields import doc
from router.openai_types import PROMPTS, PoolingBody, Unsupported, absent

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
