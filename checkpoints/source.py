"""The Hugging Face files of a model, whichever container it comes in."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import ConfigError

GGUF = ".gguf"


def is_gguf(model: str) -> bool:
    """Return whether a model's name ends like a GGUF file's."""
    return model.endswith(GGUF)


def use_download_dir(folder: str | None) -> None:
    """Make this process and its children store hub downloads in `folder`, if given."""
    if folder is None:
        return
    from huggingface_hub import constants

    os.environ["HF_HUB_CACHE"] = constants.HF_HUB_CACHE = str(Path(folder).expanduser().absolute())


def hf_source(model: str, revision: str | None = None) -> str:
    """Return the local folder, or the hub id, with the model's `config.json` and tokenizer.

    For a GGUF file, make the folder at the first call. Raises ConfigError.
    """
    if not is_gguf(model):
        return model
    from checkpoints.gguf.folder import gguf_folder

    path = Path(model).expanduser()
    return str(gguf_folder(path if path.exists() else _from_hub(model, revision)))


def split_hub_file(model: str) -> tuple[str, str]:
    """Return the repository and the file of `owner/repository/file.gguf`. Raises ConfigError."""
    owner, _, rest = model.partition("/")
    repository, _, file = rest.partition("/")
    if not file:
        raise ConfigError(
            f"--model: there is no file {model}, and a file on the hub is owner/repository/file.gguf"
        )
    return f"{owner}/{repository}", file


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    repository, file = split_hub_file(model)
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot get {file} of {repository!r}: {error}") from error
