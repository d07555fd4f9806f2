"""The Hugging Face files of a model, whichever container it comes in, and the drafting method of a draft."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol.errors import ConfigError
from protocol.speculation import Method

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
    from checkpoints.gguf.config import gguf_folder

    path = Path(model).expanduser()
    return str(gguf_folder(path if path.exists() else _from_hub(model, revision)))


def read_object(path: Path, flag: str) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError that names `flag` and the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {path}: must be a JSON object")
    return content


@contextmanager
def open_tensors(path: Path, flag: str) -> Iterator[Any]:
    """Open a safetensors file for torch. Raises ConfigError that names `flag` and the file if the file, or a
    tensor read from it, cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{flag}: {path}: cannot be read: {error}") from error


def folder_of(model: str, flag: str, patterns: list[str], revision: str | None = None) -> Path:
    """Return the local folder, or that of the hub id's files that match. Raises ConfigError."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{flag}: {model!r} is neither a folder nor an accessible repository: {reason}"
        ) from error


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


SPECULATORS: Mapping[str, Method] = MappingProxyType({"eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"})
"""The method by a Speculators checkpoint's `speculators_model_type`."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "eagle": "a layout of EAGLE-1 that its library no longer writes; EAGLE's own layout is served",
        "peagle": "a head that drafts in one pass, which vLLM serves as eagle3 with parallel_drafting",
        "dflash2": "DFlash with convolutions and a selector, which vLLM serves",
        "dspark": "DFlash with a Markov head, which vLLM serves",
        "xpress": "DFlash with a refining head, which vLLM serves",
    }
)
"""Types that no method here drafts with; each value says what the type is and what serves it."""

ASSISTANTS = "gemma4_assistant", "gemma4_unified_assistant"
"""Types of models that draft over a larger model's KV: the method `mtp`."""

_EAGLE_FIELDS = "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"


def draft_method(model: str, flag: str) -> Method:
    """Return the method for a folder or a hub id. Raises ConfigError that names `flag` if config.json names
    no method, or one that is not served.
    """
    of_model = f"{flag}: model"
    path = folder_of(str(Path(model).expanduser()), of_model, ["config.json"]) / "config.json"
    config = read_object(path, of_model)
    if fault := refusal(config):
        raise ConfigError(f"{of_model}: {path}: {fault}")
    method = _method(config)
    if method is None:
        raise ConfigError(f"{flag}: method: must be given, since {path} tells none")
    return method


def refusal(config: Mapping[str, Any]) -> str:
    """Return why no method drafts with the checkpoint of this config.json, or "" if one does."""
    kind = config.get("speculators_model_type")
    if kind is None or kind in SPECULATORS:
        return ""
    what = _REFUSED.get(str(kind), f"none of {', '.join(SPECULATORS)}, which are served")
    return f"speculators_model_type {kind!r} is {what}"


def _method(config: Mapping[str, Any]) -> Method | None:
    if kind := config.get("speculators_model_type"):
        return SPECULATORS[kind]
    if config.get("model_type") in ASSISTANTS:
        return "mtp"
    names = [str(config.get("model_type")), *map(str, config.get("architectures") or ())]
    if "dflash_config" in config or any("dflash" in name.lower() for name in names):
        return "dflash"
    if any("medusa" in name.lower() for name in names) or "medusa_num_heads" in config:
        return "medusa"
    if any("eagle" in name.lower() for name in names) or any(name in config for name in _EAGLE_FIELDS):
        return "eagle"
    return "draft_model" if any(name.endswith("ForCausalLM") for name in names) else None
