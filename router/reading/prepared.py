"""A request's body as plain data, after it was checked and tokenized here or in the preprocessor."""

from __future__ import annotations

from array import array

import msgspec

from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from router.answers.formats import OutputOptions
from router.grammars.grammar_request import AskedGrammar
from router.text.choice import Echo, Prompt


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens and the most tokens that may follow. `echo` is its text if the answer begins with
    the prompt. Drafts may come from the `prediction` of the answer.
    """

    token_ids: list[int] | bytes
    max_tokens: int
    echo: str | None = None
    echo_offsets: list[int] | bytes = []
    prediction: list[int] | bytes = []

    def packed(self) -> PreparedPrompt:
        """Return a copy with bytes for lists: decoding a list of a million numbers would block for long."""
        return msgspec.structs.replace(
            self,
            token_ids=_packed(self.token_ids),
            echo_offsets=_packed(self.echo_offsets),
            prediction=_packed(self.prediction),
        )

    def unpacked(self) -> Prompt:
        echo = None if self.echo is None else Echo(self.echo, _unpacked(self.echo_offsets))
        return Prompt(_unpacked(self.token_ids), echo, _unpacked(self.prediction))


class EarlierResponse(msgspec.Struct, frozen=True, tag=True):
    """The request continues this stored response, whose items are needed to read it."""

    response_id: str


class PreparedResponse(msgspec.Struct, frozen=True):
    """The fields that `/v1/responses` repeats and stores, as JSON by name, and the conversation's items."""

    echoed: dict[str, bytes]
    items: bytes
    is_stored: bool


class PreparedRanking(msgspec.Struct, frozen=True):
    """Says how many results of a reranking are returned, and the documents that they repeat, if any."""

    top_n: int
    documents: list[str]


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request with tokenized prompts. `params` lack the grammar and fields that differ among choices."""

    model: str | None
    prompts: list[PreparedPrompt]
    params: SamplingParams
    output: OutputOptions = OutputOptions()
    n: int = 1
    stop: list[str] = []
    include_stop: bool = False
    priority: int = 0
    cache_salt: str = ""
    speculation: RequestSpeculation | None = None
    split: bool | None = None
    thinking_budget: int | None = None
    grammar: AskedGrammar | None = None
    warning: str | None = None
    """Names a part of the request that has no effect."""
    ignored: list[str] = []
    """Fields of the body that are unknown here."""
    response: PreparedResponse | None = None
    as_base64: bool = False
    """Embeddings are returned as base64."""
    num_first: int = 0
    """The number of prompts that are a score's first texts."""
    ranking: PreparedRanking | None = None


def _packed(numbers: list[int] | bytes) -> bytes:
    return numbers if isinstance(numbers, bytes) else array("q", numbers).tobytes()


def _unpacked(numbers: list[int] | bytes) -> list[int]:
    return numbers if isinstance(numbers, list) else array("q", numbers).tolist()
