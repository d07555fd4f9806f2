"""Asks the Hugging Face hub, once, for a model that is not a local folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from checkpoints.source import is_gguf, split_hub_file
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG = "config.json"
TIMEOUT_S = 10.0
_OFFLINE = "HF_HUB_OFFLINE"


def check_source(source: str, flag: str, revision: str | None = None, file: str = CONFIG) -> None:
    """Check that `source` is a local folder, or a hub id whose `file` is on the hub or in the local cache.
    Raises `ConfigError`, naming the flag.

    If the hub does not answer, this process and its children use only the cache and never ask the hub again,
    since each file would take half a minute.
    """
    if Path(source).is_dir() or (is_gguf(source) and Path(source).exists()):
        return
    if source.startswith(("/", ".", "~")):
        raise ConfigError(f"{flag}: there is no {'file' if is_gguf(source) else 'folder'} {source}")
    if is_gguf(source):
        source, file = split_hub_file(source)
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(source, file, revision=revision), timeout=TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{flag}: {source!r} is no folder here, and the hub does not give its {file} (a private or gated "
            f"model needs HF_TOKEN): {reason}"
        ) from error
    except Exception as error:  # each HTTP library has errors of its own
        if not isinstance(try_to_load_from_cache(source, file, revision=revision), str):
            raise ConfigError(
                f"{flag}: {source!r} is no folder here, it is not in the cache, and the hub "
                f"({constants.ENDPOINT}) cannot be reached: {error}"
            ) from error
        if not constants.HF_HUB_OFFLINE:
            log.warning("the hub cannot be reached (%s): models are taken from the cache", error)
            constants.HF_HUB_OFFLINE = True
            os.environ[_OFFLINE] = "1"
