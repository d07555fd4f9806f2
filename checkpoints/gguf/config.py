"""The metadata of a GGUF file as a Hugging Face `config.json`, in a folder of its own, so that readers of
such folders read it. The weights stay in the file, which `config.json` names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from checkpoints.gguf.families import FAMILIES, FIELDS, OPTIONAL, check_number, family_of, need, rope_scaling
from checkpoints.gguf.reader import GgufError, GgufFile, read_gguf
from checkpoints.gguf.tokenizer import build_tokenizer, end_tokens, token_id, tokenizer_settings
from native.ownership import cache_dir, check_own, locked, own_folder
from protocol.errors import ConfigError

METHOD = "gguf"
"""The `quant_method` in the `quantization_config`."""
NO_TOKENIZER = "no_tokenizer.txt"
"""A file of the folder that says why the tokenizer could not be built."""


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of `config.json`. Raises GgufError, naming the field or tensor."""
    family = family_of(file)
    if family is None:
        return _config_of_transformers(file)
    fields = FIELDS | family.fields
    config = {ours: need(file, name) for name, ours in fields.items() if ours}
    heads = config["num_attention_heads"]
    config |= {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "dtype": _dtype(file),
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": file.get("attention.key_length", config["hidden_size"] // heads),
        "vocab_size": len(file.need("tokenizer.ggml.tokens", list)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": file.get("rope.freq_base", 10_000.0),
        **_quantization(file),
        **_special_tokens(file),
    }
    config |= rope_scaling(file, config) | family.more(file, config)
    config = {name: value for name, value in config.items() if value is not None}
    for name, ours in OPTIONAL.items():
        check_number(file, name, config.get(ours, 0))
    return config


def _config_of_transformers(file: GgufFile) -> dict[str, Any]:
    """Return the config that Transformers' own reader makes of an architecture not in `FAMILIES`."""
    # Imported here since both import torch, which takes seconds.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config: dict[str, Any] = load_gguf_checkpoint(str(file.path))["config"]
    except Exception as error:  # the reader assumes the fields of a whole file
        names = f"is {file.architecture!r}, not one of {', '.join(FAMILIES)}"
        file.fail(f"general.architecture: {names}, and Transformers cannot read it: {error!r}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if model_class is None:
        file.fail(f"general.architecture: {file.architecture} is no decoder")
    derived = {"architectures": [model_class], "dtype": _dtype(file), **_quantization(file)}
    return config | derived | {name: each for name, each in _special_tokens(file).items() if each is not None}


def _quantization(file: GgufFile) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": METHOD, "file": str(file.path)}}


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    ends = end_tokens(file)
    return {
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token_id(file, "padding"),
    }


_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""The fields of `general.sampling`, by the names of `generation_config.json`."""


def _sampling_defaults(file: GgufFile) -> dict[str, Any]:
    """Return the sampling parameters that the model's makers recommend, without a float32's extra digits."""
    stored = {ours: file.metadata.get(f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
    return {
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in stored.items()
        if value is not None
    }


def _dtype(file: GgufFile) -> str:
    """Return float32 if all matrices are float32, else bfloat16. Norms are float32 in every file."""
    matrices = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices <= {GGMLQuantizationType.F32} else "bfloat16"


_LAYOUT = 5
"""Version of the folder's content; raise it when the content written for a file changes."""


_LEFTOVER_S = 3600
"""Age in seconds at which a folder without a configuration was left by a process that was killed."""


def gguf_folder(path: Path) -> Path:
    """Return the cached folder of a GGUF file; make it at the first call. Raises GgufError.

    Deletes the folders of files that are gone or have changed, so the cache grows no larger than its files.
    """
    path = path.absolute()
    try:
        return _made_once(path, own_folder(cache_dir() / "gguf"))
    except OSError as error:  # from the file, or from a cache that is full or another user's
        raise GgufError(f"{path}: cannot be read: {error}") from error


def _made_once(path: Path, cache: Path) -> Path:
    target = cache / _key(path)
    with locked(cache / f"{target.name}.lock"):
        if not target.is_dir():
            file = read_gguf(path)
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _write(file, Path(made) / "folder")
                _put(Path(made) / "folder", target)
            _delete_outdated(cache)
    check_own(target)
    return target


def _delete_outdated(cache: Path) -> None:
    """Delete what a process no longer finds here. A failure costs only space."""
    for folder in cache.iterdir():
        with contextlib.suppress(OSError, ValueError, LookupError):
            if folder.is_dir() and _is_outdated(folder):
                shutil.rmtree(folder)
                (cache / f"{folder.name}.lock").unlink(missing_ok=True)


def _is_outdated(folder: Path) -> bool:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _LEFTOVER_S
    try:
        return _key(Path(content["quantization_config"]["file"])) != folder.name
    except (FileNotFoundError, NotADirectoryError):
        return True


def _put(made: Path, target: Path) -> None:
    """Put a folder in its place, unless another process was faster."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _key(path: Path) -> str:
    stat = path.stat()
    version = f"{_LAYOUT} {path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return f"{path.stem}-{hashlib.sha256(version.encode()).hexdigest()[:16]}"


def _write(file: GgufFile, folder: Path) -> None:
    with _naming(file, "its metadata"):
        config, settings = hf_config(file), tokenizer_settings(file)
    folder.mkdir(mode=0o700)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    generation = ends | _sampling_defaults(file)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))
    try:
        with _naming(file, "its tokenizer"):
            build_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    except GgufError as error:  # the model can still be served with another tokenizer
        (folder / NO_TOKENIZER).write_text(str(error))


@contextlib.contextmanager
def _naming(file: GgufFile, part: str) -> Iterator[None]:
    """Let a fault name the file and this part of it: a field may be of any type, and tokenizers raises plain
    Exception.
    """
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:
        file.fail(f"{part} cannot be used: {error!r}")
