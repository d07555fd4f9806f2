"""The metadata of a GGUF file as a Hugging Face `config.json`, in a folder of its own, so that readers of
such folders read it. The weights stay in the file, which `config.json` names.

Metadata names come from ggml's docs/gguf.md and from llama.cpp's `convert_hf_to_gguf.py`, which writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from checkpoints.gguf.reader import GgufError, GgufFile, read_gguf
from checkpoints.gguf.tokenizer import build_tokenizer, end_tokens, tokenizer_settings
from native.ownership import cache_dir, check_own, locked, own_folder

METHOD = "gguf"
"""The `quant_method` in the `quantization_config`."""
NO_TOKENIZER = "no_tokenizer.txt"
"""A file of the folder that says why the tokenizer could not be built."""

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True)
class Architecture:
    """Transformers' names for a GGUF architecture's model and fields."""

    model_type: str
    model_class: str
    fields: dict[str, str] = field(default_factory=dict)
    """Names of further fields that every file of the architecture has."""
    more: Callable[[GgufFile, dict[str, Any]], dict[str, Any]] = lambda file, config: {}
    """A function that returns the fields that must be computed."""


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Gemma's own fields. The layer count tells the 27 B models, which scale queries differently."""
    largest = {"gemma2": 46, "gemma3": 62}[file.architecture]
    is_largest = config["num_hidden_layers"] == largest
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(file, config) | {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(file, config) | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_local_base_freq": file.get("rope.freq_base_swa", 10_000.0),
    }


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    rotated = file.get("rope.dimension_count", config["head_dim"])
    found: dict[str, Any] = {
        "partial_rotary_factor": rotated / config["head_dim"],
        "sliding_window": file.get("attention.sliding_window") or None,
    }
    factors = [file.tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long")]
    if None not in factors:
        short, long = (_floats(file, each.name) for each in factors if each is not None)
        original = file.need("phi3.rope.scaling.original_context_length", int)
        found |= {
            "original_max_position_embeddings": original,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "factor": config["max_position_embeddings"] / original,
                "original_max_position_embeddings": original,
            },
        }
    return found


def _experts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    shared = file.get("expert_shared_feed_forward_length")
    normalizes = file.architecture == "qwen3moe"  # llama.cpp always does, whatever the file says
    return {"norm_topk_prob": normalizes} | (
        {"shared_expert_intermediate_size": shared} if shared is not None else {}
    )


def _gpt_oss(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling. The makers' yarn does not round the range of frequencies that it scales."""
    scaling = _rope_scaling(file, config).get("rope_scaling")
    return {"rope_scaling": {"rope_type": "default"} if scaling is None else scaling | {"truncate": False}}


_WINDOW = {"attention.sliding_window": "sliding_window"}
FAMILIES = {
    "llama": Architecture("llama", "LlamaForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _EXPERT_FIELDS, _experts),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERT_FIELDS, _experts),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _WINDOW, _gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _WINDOW, _gemma3),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", more=_phi3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _WINDOW | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        _gpt_oss,
    ),
}
"""Architectures whose tensors are read as stored, by the name in `general.architecture`."""


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of `config.json`. Raises GgufError, naming the field or tensor."""
    architecture = file.architecture
    family = FAMILIES.get(architecture)
    if family is None:
        return _config_of_transformers(file)
    if architecture == "llama" and file.get("expert_count"):
        file.fail("llama.expert_count: experts of the architecture llama (Mixtral) are not supported")
    fields = _FIELDS | family.fields
    config = {ours: _need(file, name) for name, ours in fields.items()}
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
    config |= _rope_scaling(file, config) | family.more(file, config)
    return {name: value for name, value in config.items() if value is not None}


def _config_of_transformers(file: GgufFile) -> dict[str, Any]:
    """Return the config that Transformers' own reader makes of an architecture not in `FAMILIES`."""
    # Imported here since both import torch, which takes seconds.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config: dict[str, Any] = load_gguf_checkpoint(str(file.path))["config"]
    except ValueError:
        known = "none that Transformers reads"
        file.fail(
            f"general.architecture: is {file.architecture!r}, not one of {', '.join(FAMILIES)}, and {known}"
        )
    except Exception as error:  # the reader assumes the fields of a whole file
        file.fail(
            f"general.architecture: Transformers cannot read this file of {file.architecture}: {error!r}"
        )
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
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
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


def _need(file: GgufFile, name: str) -> Any:
    value = file.get(name)
    if value is None:
        file.fail(f"{file.architecture}.{name}: is missing")
    if isinstance(value, list):
        file.fail(f"{file.architecture}.{name}: differs by layer, which is not supported")
    return value


def _dtype(file: GgufFile) -> str:
    """Return float32 if all matrices are float32, else bfloat16. Norms are float32 in every file."""
    matrices = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices <= {GGMLQuantizationType.F32} else "bfloat16"


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3_scaling(file, config)}
    kind = file.get("rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        return {}
    if kind not in ("linear", "yarn"):
        file.fail(f"{file.architecture}.rope.scaling.type: is {kind!r}, not none, linear, yarn or longrope")
    scaling = {"rope_type": kind, "factor": _need(file, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _need(file, "rope.scaling.original_context_length")
    return {"rope_scaling": scaling}


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling, from each frequency's divisor; the slowest one's divisor is the factor."""
    found = _floats(file, "rope_freqs.weight")
    frequencies = config["rope_theta"] ** -(np.arange(len(found)) / len(found))
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(found[-1])),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(found, _llama3_factors(frequencies, scaling), rtol=1e-3):
        file.fail("tensor rope_freqs.weight: its factors are not those of Llama 3's rope scaling")
    return scaling


def _llama3_factors(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Return Llama 3.1's divisors of the frequencies: the factor for slow ones, 1 for fast ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _floats(file: GgufFile, name: str) -> Sequence[float]:
    tensor = file.tensors[name]
    if tensor.type is not GGMLQuantizationType.F32:
        file.fail(f"tensor {name}: has type {tensor.type.name}, not F32")
    values: list[float] = tensor.data.view(np.float32).reshape(-1).tolist()
    return values


_LAYOUT = 3
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
        build_tokenizer(file).save(str(folder / "tokenizer.json"), pretty=False)
    except GgufError as error:  # the model can still be served with another tokenizer
        (folder / NO_TOKENIZER).write_text(str(error))
