"""The model's own defaults of sampling parameters, which are in its `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from checkpoints.source import hf_source
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.sampling import SamplingParams, check_sampling_params
from router.text.tokenizer_files import find_files

FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Values for requests that give none; None: what `SamplingParams` has. No answer is longer
    than `max_new_tokens`, whatever a request says.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that are given."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        fields.pop("max_new_tokens", None)
        return fields


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
    defaults = msgspec.json.decode(path.read_bytes(), type=GenerationDefaults)
    check_sampling_params(SamplingParams(max_tokens=1, **defaults.sampling()), 1, 0)
    if defaults.max_new_tokens is not None and defaults.max_new_tokens < 1:
        raise InvalidRequestError("max_new_tokens", f"must be at least 1, got {defaults.max_new_tokens}")
    return defaults
