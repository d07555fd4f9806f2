"""A Hugging Face folder for a GGUF file, so that readers of such folders read the file's metadata.

The weights stay in the file, which the folder's `config.json` names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from pathlib import Path

from checkpoints.gguf.config import hf_config
from checkpoints.gguf.reader import GgufError, GgufFile, read_gguf
from checkpoints.gguf.tokenizer import build_tokenizer, tokenizer_settings
from native.ownership import cache_dir, check_own, open_own, own_folder

_LAYOUT = 1
"""Version of the folder's content; raise it when the content written for a file changes."""


def gguf_folder(path: Path) -> Path:
    """Return the cached folder of a GGUF file; make it at the first call. Raises GgufError."""
    path = path.absolute()
    try:
        return _made_once(path, own_folder(cache_dir() / "gguf"))
    except OSError as error:  # from the file, or from a cache that is full or another user's
        raise GgufError(f"{path}: cannot be read: {error}") from error


def _made_once(path: Path, cache: Path) -> Path:
    target = cache / _key(path)
    with open(open_own(cache / f"{target.name}.lock", os.O_RDWR | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the host wait here and find the folder made
        if not target.is_dir():
            file = read_gguf(path)
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _write(file, Path(made) / "folder")
                (Path(made) / "folder").rename(target)
    check_own(target)
    return target


def _key(path: Path) -> str:
    stat = path.stat()
    version = f"{_LAYOUT} {path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return f"{path.stem}-{hashlib.sha256(version.encode()).hexdigest()[:16]}"


def _write(file: GgufFile, folder: Path) -> None:
    config, settings = hf_config(file), tokenizer_settings(file)
    tokenizer = build_tokenizer(file)
    folder.mkdir(mode=0o700)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
    tokenizer.save(str(folder / "tokenizer.json"))
