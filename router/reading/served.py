"""The served model's limits, names and defaults, which are needed to read a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from checkpoints.source import hf_source
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.sampling import SAMPLING_FIELDS, SamplingParams, check_sampling_params
from router.errors import ApiError
from router.text.tokenizer_files import find_files

FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True):
    """The model's own defaults: `sampling` fields for requests that give none, and a cap on every answer."""

    sampling: dict[str, Any] = {}
    max_new_tokens: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return the defaults as the file has them."""
        cap = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return self.sampling | cap


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """The model's limits, its defaults, and the names that requests may use: its own and its adapters'."""

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
        """Raise if the prompt is empty or leaves no room for one more token."""
        if not token_ids:
            raise InvalidRequestError(field, "must not be empty")
        if len(token_ids) >= self.max_model_len:
            limit = f"the model's maximum context length of {self.max_model_len} tokens"
            raise too_long(field, f"its {len(token_ids)} tokens leave no room for an answer within {limit}")


def too_long(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field}: {reason}", param=field, code="context_length_exceeded")


def unknown_model(name: str, known: Collection[str]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} does not exist; this server has {', '.join(known)}",
        param="model",
        code="model_not_found",
    )


def load_defaults(config: ServeConfig) -> GenerationDefaults:
    """Return the defaults that `--generation-config` asks for. Raises `ConfigError`, with file and field."""
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
    names = [name for name, (_, asked) in SAMPLING_FIELDS.items() if asked.is_models]
    given = {name: content[name] for name in names if content.get(name) is not None}
    params = msgspec.convert({"max_tokens": 1, **given}, SamplingParams)
    check_sampling_params(params, 1, 0)
    cap = msgspec.convert(content.get("max_new_tokens"), int | None)
    if cap is not None and cap < 1:
        raise InvalidRequestError("max_new_tokens", f"must be at least 1, got {cap}")
    return GenerationDefaults({name: getattr(params, name) for name in given}, cap)
