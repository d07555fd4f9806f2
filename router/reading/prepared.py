"""The served model's limits, names and defaults, and a request's body as plain data, checked and tokenized in
the router or in the preprocessor.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from checkpoints.source import hf_source
from checkpoints.tokenizer import find_files
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.sampling import MODELS_OWN, SamplingParams, check_sampling_params
from protocol.speculation import RequestSpeculation
from router.answers.formats import OutputOptions
from router.errors import ApiError, too_long
from router.grammars.structured_outputs import AskedGrammar
from router.text.choice import Echo, Prompt

FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The model's own defaults: `sampling` fields for requests without them, and a cap on every answer."""

    sampling: dict[str, Any] = {}
    max_new_tokens: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return the defaults with the file's names."""
        cap = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return self.sampling | cap


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """The model's limits and defaults, and the names that requests may use: its own and its adapters'."""

    max_model_len: int
    vocab_size: int
    names: tuple[str, ...]
    defaults: GenerationDefaults = GenerationDefaults()

    def check_name(self, name: str | None) -> None:
        """Raise `ApiError` 404 if no served model has this name."""
        if name is not None and name not in self.names:
            raise unknown_model(name, self.names)

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise InvalidRequestError(field, f"token ids must be in [0, {self.vocab_size - 1}]")

    def check_prompt(self, field: str, token_ids: Sequence[int]) -> None:
        """Raise an error if the prompt is empty or leaves no room for one more token."""
        if not token_ids:
            raise InvalidRequestError(field, "must not be empty")
        if len(token_ids) >= self.max_model_len:
            limit = f"the model's maximum context length of {self.max_model_len} tokens"
            raise too_long(field, f"its {len(token_ids)} tokens leave no room for an answer within {limit}")


def unknown_model(name: str, known: Collection[str]) -> ApiError:
    message = f"the model {name!r} does not exist; this server has {', '.join(known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def load_defaults(config: ServeConfig) -> GenerationDefaults:
    """Return the defaults for `--generation-config`. Raises `ConfigError` with file and field."""
    if config.generation_config == "vllm":
        return GenerationDefaults()
    if config.generation_config == "auto":
        flag, source = "--model", hf_source(config.model, config.revision)
    else:
        flag, source = "--generation-config", config.generation_config
        if not Path(source).is_dir():
            raise ConfigError(f"{flag}: must be auto, vllm or a folder, got {source}")
    path = find_files(source, config.revision, (FILE,), flag).get(FILE)
    if path is None and config.generation_config == "auto":
        return GenerationDefaults()
    if path is None:
        raise ConfigError(f"{flag}: {source} has no {FILE}")
    try:
        return _read(path)
    except (OSError, msgspec.MsgspecError, InvalidRequestError) as error:
        raise ConfigError(f"{flag}: {path}: {error}") from error


def _read(path: Path) -> GenerationDefaults:
    content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    chosen = {name: content[name] for name in MODELS_OWN if content.get(name) is not None}
    params = msgspec.convert({"max_tokens": 1, **chosen}, SamplingParams)
    check_sampling_params(params, 1, 0)
    cap = msgspec.convert(content.get("max_new_tokens"), int | None)
    if cap is not None and cap < 1:
        raise InvalidRequestError("max_new_tokens", f"must be at least 1, got {cap}")
    return GenerationDefaults({name: getattr(params, name) for name in chosen}, cap)


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens, and the most tokens of its answer. `echo`: the prompt's text if the answer begins
    with it. `prediction`: tokens of the expected answer, from which drafts may come.
    """

    token_ids: list[int] | bytes
    max_tokens: int
    echo: str | None = None
    echo_offsets: list[int] | bytes = []
    prediction: list[int] | bytes = []

    def packed(self) -> PreparedPrompt:
        """Return a copy with bytes instead of lists: decoding a million numbers would block for long."""
        names = ("token_ids", "echo_offsets", "prediction")
        return msgspec.structs.replace(self, **{name: _packed(getattr(self, name)) for name in names})

    def unpacked(self) -> Prompt:
        echo = None if self.echo is None else Echo(self.echo, _unpacked(self.echo_offsets))
        return Prompt(_unpacked(self.token_ids), echo, _unpacked(self.prediction))


class EarlierResponse(msgspec.Struct, frozen=True, tag=True):
    """A stored response that the request continues; its items are needed to read the request."""

    response_id: str


class PreparedResponse(msgspec.Struct, frozen=True):
    """The fields that `/v1/responses` repeats and stores, as JSON by name, and the conversation's items."""

    echoed: dict[str, bytes]
    items: bytes
    is_stored: bool


class PreparedRanking(msgspec.Struct, frozen=True):
    """The number of results of a reranking, and the documents to repeat in them, if any."""

    top_n: int
    documents: list[str]


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request with tokenized prompts. `params` lack the grammar and what differs among choices."""

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
    """Warning about a part of the request that has no effect."""
    ignored: list[str] = []
    """Names of unknown fields of the body."""
    response: PreparedResponse | None = None
    as_base64: bool = False
    """Whether embeddings are returned as base64."""
    num_first: int = 0
    """Number of prompts that are the first texts of a score."""
    ranking: PreparedRanking | None = None


def _packed(numbers: list[int] | bytes) -> bytes:
    return numbers if isinstance(numbers, bytes) else array("q", numbers).tobytes()


def _unpacked(numbers: list[int] | bytes) -> list[int]:
    return numbers if isinstance(numbers, list) else array("q", numbers).tolist()
