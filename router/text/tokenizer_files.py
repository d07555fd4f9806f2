"""Finds a model's tokenizer files, in a local folder or on the hub, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.source import hf_source
from protocol.config import ServeConfig
from protocol.errors import ConfigError

_TEMPLATES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *_TEMPLATES.values())
_CONVERT = (
    "import sys; from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained(sys.argv[1], revision=sys.argv[2] or None, "
    "trust_remote_code=sys.argv[3] == 'True').save_pretrained(sys.argv[4])"
)
CONVERT_TIMEOUT_S = 300.0
_SLOW = ("*token*", "*.model", "*.vocab", "vocab*", "merges*")
"""Names of the files that a tokenizer can be converted from."""


def load_files(config: ServeConfig) -> tuple[str, dict[str, Any]]:
    """Return the text of `tokenizer.json` and the settings of `tokenizer_config.json`.

    Chat templates in separate files take precedence over those of the settings. If a model has only a slow
    tokenizer's files, Transformers converts them in a separate process. Raises `ConfigError`.
    """
    source = hf_source(config.tokenizer_source, config.revision)
    flag = tokenizer_flag(config)
    files = find_files(source, config.revision, FILES, flag)
    if "tokenizer.json" in files:
        return _read(files, flag)
    if Path(source).is_dir() and not any(path for name in _SLOW for path in Path(source).glob(name)):
        raise ConfigError(f"{flag}: {source} has no tokenizer (tokenizer.json, or files of a slow tokenizer)")
    with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
        _convert(config, folder)
        return _read(find_files(folder, None, FILES, flag), flag)


def find_files(source: str, revision: str | None, names: Sequence[str], flag: str) -> dict[str, Path]:
    """Return the files that a folder, the hub or (offline) its cache has. Raises `ConfigError`."""
    if Path(source).is_dir():
        return {name: Path(source) / name for name in names if (Path(source) / name).is_file()}
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    files = {}
    for name in names:
        try:
            files[name] = Path(hf_hub_download(source, name, revision=revision))
        except LocalEntryNotFoundError as error:
            if not constants.HF_HUB_OFFLINE:  # the hub did not answer
                raise ConfigError(f"{flag}: cannot get {name} of {source!r}: {error}") from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ConfigError(f"{flag}: cannot get {name} of {source!r}: {error}") from error
    return files


def tokenizer_flag(config: ServeConfig) -> str:
    """Return the option that names the tokenizer's source."""
    return "--model" if config.tokenizer is None else "--tokenizer"


def _convert(config: ServeConfig, folder: str) -> None:
    arguments = [config.tokenizer_source, config.revision or "", str(config.trust_remote_code), folder]
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, *arguments],
        capture_output=True,
        text=True,
        timeout=CONVERT_TIMEOUT_S,
    )
    if done.returncode or not (Path(folder) / "tokenizer.json").is_file():
        reason = (done.stderr.strip().splitlines() or ["it has no fast tokenizer"])[-1]
        raise ConfigError(
            f"{tokenizer_flag(config)}: {config.tokenizer_source} has no usable tokenizer: {reason}"
        )


def _read(files: dict[str, Path], flag: str) -> tuple[str, dict[str, Any]]:
    try:
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if name in files:
                settings.update(json.loads(files[name].read_text()))
        templates = [
            {"name": name, "template": files[file].read_text()}
            for name, file in _TEMPLATES.items()
            if file in files
        ]
        if templates:
            settings["chat_template"] = templates
        return files["tokenizer.json"].read_text(), settings
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot read the tokenizer's files: {error}") from error
