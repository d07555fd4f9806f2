"""Checks the configuration against small files, local or on the Hugging Face hub, before Ray is started.

A worker would find the same faults only after Ray's start, its own imports and the loading of weights.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from checkpoints.mtp_layouts import find_layouts
from checkpoints.source import ASSISTANTS, hf_source, is_gguf, split_hub_file
from checkpoints.tokenizer import TokenizerSource, check_tokenizer
from deploy.resources import (
    check_heads,
    check_number,
    cuda_fault,
    has_cuda_build,
    in_container,
    may_use_gpu,
    plan_workers,
)
from engine.limits import check_draft, check_quantization, choose_max_model_len, cpu_pool_budget
from engine.lora.config import AdapterError, check_files
from native.process import raise_file_limit
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.reading.prepared import GenerationDefaults, load_defaults
from worker.cores import host_cores

log = logging.getLogger(__name__)

CONFIG = "config.json"
TIMEOUT_S = 10.0
LEAST_OPEN_FILES, USUAL_OPEN_FILES = 256, 1024
_OFFLINE = "HF_HUB_OFFLINE"


def check_source(source: str, flag: str, revision: str | None = None, file: str = CONFIG) -> None:
    """Check that `source` is a local folder, or a hub id whose `file` is on the hub or in the local cache.
    Raises `ConfigError`, naming the flag.

    If the hub does not answer, this process and its children use only the cache and never ask the hub again,
    since each file would take half a minute.
    """
    if not source:
        raise ConfigError(f"{flag}: must name a folder, a file or a hub id, got ''")
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
    except Exception as error:  # each HTTP library has its own error types
        if not isinstance(try_to_load_from_cache(source, file, revision=revision), str):
            raise ConfigError(
                f"{flag}: {source!r} is no folder here, it is not in the cache, and the hub "
                f"({constants.ENDPOINT}) cannot be reached: {error}"
            ) from error
        if not constants.HF_HUB_OFFLINE:
            log.warning("the hub cannot be reached (%s): models are taken from the cache", error)
            constants.HF_HUB_OFFLINE = True
            os.environ[_OFFLINE] = "1"


_POSITIONS = ("max_position_embeddings", "n_positions")
"""The fields of a `config.json` that give the longest sequence."""
_WEIGHTS = ("*.safetensors", "*.bin")
_PLAIN = ("gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")
"""Model types whose layers all keep keys and values of every head, except for sliding windows."""
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_start(config: ServeConfig) -> GenerationDefaults:
    """Return the requests' defaults. Raises `ConfigError`, with flag and limit, if the start must fail."""
    _check_open_files()
    if config.ray_address is None and not may_use_gpu(config):
        check_number(config, host_cores())
    check_source(config.model, "--model", config.revision)
    if config.tokenizer is not None:
        check_source(config.tokenizer, "--tokenizer", config.revision, "tokenizer_config.json")
    check_tokenizer(TokenizerSource.of(config))
    defaults = load_defaults(config)
    model = _read_config(config.model, config.revision, "--model")
    _check_weights(config)
    _check_backend(config)
    _check_disk(config)
    _check_worker_host(config)
    if model.get("is_encoder_decoder"):
        raise ConfigError(f"--model: {config.model}: encoder-decoder models are not supported")
    quantized = model.get("quantization_config")
    method = str(quantized.get("quant_method")) if isinstance(quantized, Mapping) else None
    check_quantization(config, method)
    decoder = _decoder(model)
    check_heads(config, decoder)
    longest = _longest(decoder)
    if longest is not None:
        max_model_len = choose_max_model_len(config.max_model_len, longest)
        _check_draft(config, decoder, max_model_len)
        _check_pool(config, decoder, max_model_len)
    for name, path in (config.lora_modules or {}).items():
        try:
            check_files(path, config.max_lora_rank)
        except AdapterError as error:
            raise ConfigError(f"--lora-modules: {name}: {error}") from error
    return defaults


def _check_open_files() -> None:
    """Raise the soft limit of open files, or raise `ConfigError` if the hard limit is too low for a start."""
    allowed = raise_file_limit(USUAL_OPEN_FILES)
    if allowed < LEAST_OPEN_FILES:
        raise ConfigError(
            f"ulimit -n: a server needs at least {LEAST_OPEN_FILES} open files, {allowed} are allowed"
        )


def _read_config(source: str, revision: str | None, flag: str) -> dict[str, Any]:
    folder = Path(hf_source(source, revision))
    try:
        path = folder / CONFIG if folder.is_dir() else _from_hub(source, revision)
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{flag}: {source} has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot read {CONFIG} of {source}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{flag}: {CONFIG} of {source} must be a JSON object")
    return content


def _from_hub(source: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, CONFIG, revision=revision))


def _decoder(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the decoder."""
    inner = model.get("text_config")
    return inner if isinstance(inner, Mapping) else model


def _longest(decoder: Mapping[str, Any]) -> int | None:
    return next((decoder[name] for name in _POSITIONS if isinstance(decoder.get(name), int)), None)


def _check_weights(config: ServeConfig) -> None:
    folder = Path(config.model)
    if config.load_format == "dummy" or not folder.is_dir():
        return
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise ConfigError(f"--model: {config.model} has no weights ({', '.join(_WEIGHTS)})")


def _check_disk(config: ServeConfig) -> None:
    """Raise `ConfigError` if this host's workers could not write to --kv-disk-path."""
    if config.kv_disk_path is None or config.ray_address is not None:
        return
    try:
        Path(config.kv_disk_path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--kv-disk-path: cannot use {config.kv_disk_path}: {error.strerror}") from error
    if not os.access(config.kv_disk_path, os.W_OK):
        raise ConfigError(f"--kv-disk-path: {config.kv_disk_path} cannot be written")


def _check_backend(config: ServeConfig) -> None:
    if config.device == "cuda" and config.ray_address is None and (fault := cuda_fault()):
        raise ConfigError(f"--device: cuda was asked for, but {fault}")
    is_local_choice = config.device == "auto" and config.ray_address is None
    if is_local_choice and in_container() and has_cuda_build() and (fault := cuda_fault()):
        raise ConfigError(
            f"--device: auto finds no GPU in this container, whose PyTorch is built for CUDA: {fault}; "
            "give --device cpu to serve on the CPU"
        )
    fits = {"triton": "cuda", "flash": "cuda", "cpu": "cpu"}
    device = fits.get(config.attention_backend, config.device)
    if config.device not in ("auto", device):
        raise ConfigError(
            f"--attention-backend: {config.attention_backend} is for --device {device}, not {config.device}"
        )
    if device == "cuda" and config.ray_address is None and (fault := cuda_fault()):
        raise ConfigError(f"--attention-backend: {config.attention_backend} is for GPUs, but {fault}")


def _check_worker_host(config: ServeConfig) -> None:
    """Raise `ConfigError` if this host's workers could not bind to --worker-host."""
    if config.worker_host is None or config.ray_address is not None:
        return
    try:
        socket.create_server((config.worker_host, 0)).close()
    except OSError as error:
        raise ConfigError(
            f"--worker-host: cannot listen on {config.worker_host}: {error.strerror}"
        ) from error


def _check_draft(config: ServeConfig, target: Mapping[str, Any], max_model_len: int) -> None:
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return
    flag = "--speculative-config: model"
    check_source(speculative.model, flag)
    content = _read_config(speculative.model, None, flag)
    if speculative.method == "mtp" and content.get("model_type") not in ASSISTANTS:
        _check_mtp(speculative.model, target, flag)
    draft = _decoder(content)
    longest, size, target_size = _longest(draft), draft.get("vocab_size"), target.get("vocab_size")
    is_draft_model = speculative.method == "draft_model"
    if is_draft_model and longest is not None and isinstance(size, int) and isinstance(target_size, int):
        check_draft(size, longest, target_size, max_model_len)


def _check_mtp(model: str, target: Mapping[str, Any], flag: str) -> None:
    """Raise `ConfigError` if a local checkpoint has no MTP head."""
    if is_gguf(model):
        raise ConfigError(f"{flag}: {model}: MTP heads are read from safetensors files, not from GGUF")
    names = _tensor_names(Path(model))
    try:
        if names:
            find_layouts(names, target.get("num_hidden_layers", 0))
    except LookupError as error:
        raise ConfigError(f"{flag}: {model}: {error}") from error


def _tensor_names(folder: Path) -> Collection[str]:
    """Return the names of a local checkpoint's tensors. Empty if they can't be read, which workers report."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            found: Collection[str] = json.loads(index.read_text())["weight_map"].keys()
            return found
        with safe_open(folder / "model.safetensors", "np") as file:
            return list(file.keys())
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return []


def _check_pool(config: ServeConfig, model: Mapping[str, Any], max_model_len: int) -> None:
    """Raise `ConfigError` if a KV pool on a CPU surely cannot hold one sequence."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    if model.get("model_type") not in _PLAIN or not all(isinstance(model.get(name), int) for name in names):
        return
    has_windows = model.get("use_sliding_window", True) and model.get("sliding_window")
    if has_windows or may_use_gpu(config) or config.ray_address is not None:
        return
    layers, heads, hidden = (model[name] for name in names)
    head_dim = model.get("head_dim") or hidden // heads
    values = 2 * layers * (model.get("num_key_value_heads") or heads) * head_dim
    stored = config.dtype if config.dtype != "auto" else model.get("dtype") or model.get("torch_dtype")
    value_bytes = _VALUE_BYTES.get(str(stored), 4) if config.kv_cache_dtype == "auto" else 1
    blocks = math.ceil(max_model_len / config.block_size)
    needed = blocks * config.block_size * values * value_bytes
    planned, _ = plan_workers(config, 0, host_cores())
    budget, reason = cpu_pool_budget(planned, max_model_len, needed)
    if budget < needed:
        tokens = budget // (values * value_bytes)
        raise ConfigError(
            f"--kv-cache-memory-bytes: a KV pool of {budget} bytes ({reason}) holds {tokens} tokens, fewer "
            f"than --max-model-len ({max_model_len}), which needs {needed} bytes"
        )
