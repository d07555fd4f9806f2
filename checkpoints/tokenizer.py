"""The files of a model's tokenizer, which the router and the workers' grammars read alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from checkpoints.source import hf_source, is_gguf
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
"""Names of the files from which Transformers can convert a slow tokenizer."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


class TokenizerSource(NamedTuple):
    """The place of a tokenizer's files. `flag` is the option that names it."""

    name: str
    revision: str | None
    is_trusted: bool
    flag: str

    @classmethod
    def of(cls, config: ServeConfig) -> TokenizerSource:
        flag = "--model" if config.tokenizer is None else "--tokenizer"
        return cls(config.tokenizer_source, config.revision, config.trust_remote_code, flag)


def load_files(source: TokenizerSource) -> tuple[str, dict[str, Any]]:
    """Return the text of `tokenizer.json` and the settings of `tokenizer_config.json`.

    Chat templates in separate files take precedence over those of the settings. If a model has only a slow
    tokenizer's files, Transformers converts them in a separate process. Raises `ConfigError`.
    """
    check_tokenizer(source)
    place, flag = hf_source(source.name, source.revision), source.flag
    files = find_files(place, source.revision, FILES, flag)
    if "tokenizer.json" in files:
        return _read(files, flag)
    if Path(place).is_dir() and not any(path for name in _SLOW for path in Path(place).glob(name)):
        raise ConfigError(f"{flag}: {place} has no tokenizer (tokenizer.json, or files of a slow tokenizer)")
    with tempfile.TemporaryDirectory(prefix="tandem-tokenizer-") as folder:
        _convert(source, folder)
        return _read(find_files(folder, None, FILES, flag), flag)


def check_tokenizer(source: TokenizerSource) -> None:
    """Raise `ConfigError` if the tokenizer is a GGUF file's and could not be built."""
    if not is_gguf(source.name):
        return
    from checkpoints.gguf.config import NO_TOKENIZER

    reason = Path(hf_source(source.name, source.revision)) / NO_TOKENIZER
    if reason.exists():
        raise ConfigError(f"{source.flag}: {reason.read_text()}")


def find_files(source: str, revision: str | None, names: Sequence[str], flag: str) -> dict[str, Path]:
    """Return the named files of a folder, of the hub, or (offline) of its cache. Raises `ConfigError`."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(source, revision=revision, allow_patterns=[*names]))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{flag}: cannot get {', '.join(names)} of {source!r}: {error}") from error
    return {name: folder / name for name in names if (folder / name).is_file()}


def _convert(source: TokenizerSource, folder: str) -> None:
    arguments = [source.name, source.revision or "", str(source.is_trusted), folder]
    command = [sys.executable, "-P", "-c", _CONVERT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S)
    if done.returncode or not (Path(folder) / "tokenizer.json").is_file():
        reason = (done.stderr.strip().splitlines() or ["it has no fast tokenizer"])[-1]
        raise ConfigError(f"{source.flag}: {source.name} has no usable tokenizer: {reason}")


def _read(files: dict[str, Path], flag: str) -> tuple[str, dict[str, Any]]:
    try:
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if name in files:
                settings.update(json.loads(files[name].read_text()))
        known = [(name, files[file]) for name, file in _TEMPLATES.items() if file in files]
        templates = [{"name": name, "template": file.read_text()} for name, file in known]
        if templates:
            settings["chat_template"] = templates
        return files["tokenizer.json"].read_text(), settings
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot read the tokenizer's files: {error}") from error


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that the settings name, by role."""
    named = {name: _content(settings.get(name)) for name in _SPECIAL_NAMES}
    return {name: content for name, content in named.items() if isinstance(content, str)}


def _content(token: Any) -> Any:
    """Return a token's text; the settings have it alone or with the token's properties."""
    return token.get("content") if isinstance(token, Mapping) else token


class _Head(msgspec.Struct):
    """The parts of `tokenizer.json` beside its vocabulary, which takes a hundred times longer to read."""

    truncation: Any = None
    padding: Any = None
    added_tokens: list[dict[str, Any]] = []


def whole_tokenizer(tokenizer_json: str, settings: Mapping[str, Any]) -> str:
    """Return the text of `tokenizer.json` as it applies: without truncation and padding, and with the added
    and special tokens that only the settings name. Raises `ConfigError`.
    """
    try:
        head = msgspec.json.decode(tokenizer_json, type=_Head)
        added = {token["content"] for token in head.added_tokens}
        special = {token["content"] for token in head.added_tokens if token.get("special")}
        with_ids = _with_ids(settings)
        given = {token.content for token in with_ids}
        named = _named(settings, added | given)
        have_ids = [
            token for token in named if token.content in given or _may_have(tokenizer_json, token.content)
        ]
        wanted = [*with_ids, *have_ids]
        missing = [token for token in wanted if token.content not in (special if token.special else added)]
        if head.truncation is None and head.padding is None and not missing:
            return tokenizer_json
        return _completed(tokenizer_json, with_ids, have_ids)
    except Exception as error:  # tokenizers raises no narrower type
        raise ConfigError(f"--tokenizer: tokenizer.json is not usable: {error}") from error


_NEEDLESS_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:/|u(?!00[01]))")
"""Matches an escape that JSON needs for no character; a text with one may spell a token in many ways."""


def _may_have(tokenizer_json: str, token: str) -> bool:
    """Return whether the text may have the token, without reading the vocabulary."""
    is_spelled = json.dumps(token, ensure_ascii=False) in tokenizer_json
    return is_spelled or _NEEDLESS_ESCAPE.search(tokenizer_json) is not None


def _completed(tokenizer_json: str, with_ids: list[AddedToken], named: list[AddedToken]) -> str:
    """Add the settings' tokens. Those that are only named keep their ids, and get none if they have none."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_tokens(with_ids)
    tokenizer.add_tokens([token for token in named if tokenizer.token_to_id(token.content) is not None])
    return tokenizer.to_str()


def _with_ids(settings: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens of `added_tokens_decoder` in the order of their ids."""
    entries = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        AddedToken(token["content"], **{name: token[name] for name in names if name in token})
        for _, token in entries
    ]


def _named(settings: Mapping[str, Any], added: Collection[str]) -> list[AddedToken]:
    """Return the special tokens that the settings name by role or in a list. As with Transformers, a list
    makes no token special that is an added one.
    """
    contents: list[Any] = [*special_tokens(settings).values()]
    for name in _SPECIAL_LISTS:
        listed = settings.get(name) or ()
        if isinstance(listed, Mapping):  # by roles of the model's own
            contents += map(_content, listed.values())
        else:
            contents += [content for content in map(_content, listed) if content not in added]
    return [AddedToken(each, special=True, normalized=False) for each in contents if isinstance(each, str)]
