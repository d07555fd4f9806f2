"""Loading of a Transformers decoder. A probe refuses models that the engine would serve wrong.

Models that a process loads before it forks are kept: its children share the weights, which are read-only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import is_accelerate_available

from checkpoints.source import hf_source, use_download_dir
from engine.devices.cuda.tiles import (
    fault_of_options,
    fault_of_weights,
    packing_of_experts,
    tile_experts_on_gpu,
    tile_on_gpu,
)
from engine.devices.loaded_model import LoadedModel, RecurrentLayers
from engine.devices.torch import transformers_hook
from engine.devices.torch.latent_attention import absorb, expansion_reason
from engine.devices.torch.recurrent_hooks import hook
from engine.kv.layout import Group
from engine.limits import check_quantization, choose_max_model_len
from engine.linear.experts import Pack, join_experts, split_experts
from engine.linear.packed import kernel_fault
from engine.linear.packed_quantized import pack_quantized_linears
from engine.load.device_memory import memory_of_their_own
from engine.load.probe import probe
from engine.load.quantized_checkpoint import describe_checkpoint, load_quantized, quantization_config
from engine.load.rounding import round_head, round_linears
from engine.lora.table import Adapters, adaptable
from engine.model.text_half import as_causal, load_checkpoint, make_model, whole_config
from engine.phases import phase
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from protocol.handoff import ROW_QUANTIZATIONS

logger = logging.getLogger("tandem.engine")

ModelIdentity: TypeAlias = tuple[object, ...]
"""A key that is equal for configurations that load and pack the same files in the same way on one host."""

_preloaded: dict[ModelIdentity, Any] = {}


def keep_preloaded(models: Sequence[tuple[ServeConfig, Any]]) -> None:
    """Keep exactly these loaded models for `load_model`."""
    _preloaded.clear()
    _preloaded.update({_identity(config): loaded for config, loaded in models})


def is_preloaded(config: ServeConfig) -> bool:
    return bool(_preloaded) and _identity(config) in _preloaded


def take_preloaded(config: ServeConfig) -> Any:
    """Return the `LoadedModel` kept for this configuration, if any, and forget it: callers may change it."""
    return _preloaded.pop(_identity(config)) if is_preloaded(config) else None


def _identity(config: ServeConfig) -> ModelIdentity:
    folder = Path(config.model)
    if not folder.exists():
        found = try_to_load_from_cache(config.model, "config.json", revision=config.revision)
        folder = Path(found).parent if isinstance(found, str) else folder
    paths = [folder, *sorted(folder.rglob("*"))]
    stats = [(str(path), path.stat()) for path in paths if path.is_file()]
    files = tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
    # The worker's share of its host changes nothing about its weights.
    alike = replace(config, worker_threads=None, worker_host=None, gpu_memory_utilization=1.0)
    return msgspec.msgpack.encode(alike), files


DUMMY_SEED = 0
"""Seed of `--load-format dummy`, so that all workers make the same weights."""


def load_model(config: ServeConfig, *, on_host: bool = False) -> LoadedModel:
    """Load the configuration's model, with `on_host` into host memory only. Raises UnsupportedModelError or
    ConfigError, naming the fault.
    """
    loaded = take_preloaded(config)
    if loaded is not None:
        return loaded
    use_download_dir(config.download_dir)
    device = choose_device(config.device)
    transformers_hook.register()
    hf_config = _load_hf_config(config)
    text_config = hf_config.get_text_config(decoder=True)
    longest = _longest(config, text_config)
    _refuse_chunks(text_config, longest)
    dtype = choose_dtype(config.dtype, hf_config, device)
    held_on = torch.device("cpu") if on_host else device
    has_kernel, pack = kernel_fault(device, dtype) is None, packing_of_experts(device, dtype)
    in_tiles = config.deterministic and device.type == "cuda"
    if in_tiles and (fault := fault_of_options(config, device, dtype)) is not None:
        raise ConfigError(f"--deterministic: {fault}")
    with phase(f"loading the weights of {config.model_name} ({_size(config)})", "seconds for each GB"):
        model = _load_weights(config, hf_config, dtype, held_on, pack, has_kernel=has_kernel)
    checkpoint = ""
    if config.load_format != "dummy":
        stays = has_kernel or device.type == "cuda"
        run_as = "multiplied as stored" if stays else f"run in {str(dtype).removeprefix('torch.')}"
        checkpoint = describe_checkpoint(model, hf_config, run_as)
    if checkpoint:
        logger.info("%s: %s", config.model_name, checkpoint)
    if config.quantization is not None and quantization_config(hf_config) is None:
        if has_kernel or pack is not None:
            split_experts(model, by_kernel=has_kernel)
        round_linears(model, CodeFormat(config.quantization))
    if config.quantize_lm_head:
        round_head(model)
    weights = model_fingerprint(model, device.type).hex()
    adapters = None
    if config.serves_adapters:
        adapters = Adapters(adaptable(model), device, dtype, config.max_lora_rank)
    expansion = expansion_reason(model, config, device)
    if not expansion:
        absorb(model)
    if in_tiles and (fault := fault_of_weights(model, config)) is not None:
        raise ConfigError(f"--deterministic: {fault}")
    if has_kernel:
        pack_quantized_linears(model)
        join_experts(model)
    elif on_host:
        join_experts(model, pack)  # ranks divide them
    elif device.type == "cuda":
        tile_experts_on_gpu(model, device, dtype)
        tile_on_gpu(model, device, dtype, plain=in_tiles)
    hooks = hook(model)
    kept = probe(model, dtype, text_config.num_hidden_layers, hooks)
    recurrent = None
    if hooks is not None and kept.state is not None:
        recurrent = RecurrentLayers(hooks, kept.state)
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        kv_group=_stored_as(kept.kv, config.kv_cache_dtype),
        vocab_size=text_config.vocab_size,
        max_model_len=longest,
        eos_token_ids=_eos_token_ids(config, model, text_config),
        weights=weights,
        recurrent=recurrent,
        adapters=adapters,
        in_ranks=max(config.prefill_tensor_parallel_size, config.decode_tensor_parallel_size) > 1,
        expansion=expansion,
        checkpoint=checkpoint,
    )


def _stored_as(group: Group, kv_cache_dtype: str) -> Group:
    if kv_cache_dtype == "auto":
        return group
    try:
        return group.stored_as(ROW_QUANTIZATIONS[kv_cache_dtype])
    except ValueError as error:
        raise ConfigError(f"--kv-cache-dtype: {kv_cache_dtype}: {error}; use auto") from error


@dataclass(frozen=True)
class ModelShape:
    """A model's dtype, vocabulary and longest sequence, known without its weights."""

    dtype: torch.dtype
    vocab_size: int
    max_model_len: int


def model_shape(config: ServeConfig) -> ModelShape:
    """Return the shape of the model that `load_model` would load. Raises `ConfigError`."""
    hf_config = _load_hf_config(config)
    text_config = hf_config.get_text_config(decoder=True)
    return ModelShape(
        choose_dtype(config.dtype, hf_config, choose_device(config.device)),
        text_config.vocab_size,
        _longest(config, text_config),
    )


def choose_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda was asked for, but this host has no usable CUDA device")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda":
        _check_allocator()
    return torch.device(requested)


def _check_allocator() -> None:
    """Raise `ConfigError` if other processes could not map this process's device memory (CUDA IPC)."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = dict(pair.partition(":")[::2] for pair in os.environ.get(name, "").split(","))
        if settings.get("expandable_segments", "").strip().lower() in ("true", "1"):
            raise ConfigError(
                f"{name}: expandable_segments must not be on: KV could not move between GPUs, since "
                "processes cannot share memory of such segments"
            )


def choose_dtype(requested: str, hf_config: Any, device: torch.device) -> torch.dtype:
    if requested != "auto":
        return getattr(torch, requested)
    stored = getattr(hf_config, "dtype", None) or torch.float32
    if stored is torch.float16 and device.type == "cpu":
        return torch.bfloat16
    return stored


def _longest(config: ServeConfig, text_config: Any) -> int:
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None and getattr(text_config, "num_attention_heads", None) is None:
        raise UnsupportedModelError(
            f"{text_config.model_type}: recurrent state without any attention is not supported"
        )
    return choose_max_model_len(config.max_model_len, positions if positions and positions > 0 else None)


def _refuse_chunks(text_config: Any, longest: int) -> None:
    """Refuse sequences longer than an attention chunk. Within the first chunk it is plain attention."""
    chunk = getattr(text_config, "attention_chunk_size", None)
    if chunk is not None and longest > chunk:
        raise UnsupportedModelError(
            f"{text_config.model_type}: attention in chunks (attention_chunk_size) is supported within one "
            f"chunk: set --max-model-len to at most {chunk}, not {longest}"
        )


def _load_hf_config(config: ServeConfig) -> Any:
    try:
        hf_config = AutoConfig.from_pretrained(
            hf_source(config.model, config.revision),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"--model: cannot load {config.model!r}: {error}") from error
    hf_config = whole_config(hf_config, trust_remote_code=config.trust_remote_code)
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{hf_config.model_type}: encoder-decoder models are not supported")
    method = quantization_config(hf_config)
    check_quantization(config, None if method is None else str(method.get("quant_method")))
    return hf_config


def _size(config: ServeConfig) -> str:
    """Return the size of the model's files if they are in a local folder."""
    folder = Path(config.model)
    if config.load_format == "dummy" or not folder.exists():
        return "unknown size"
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")] if folder.is_dir() else [folder]
    return f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB"


def _load_weights(
    config: ServeConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack | None,
    *,
    has_kernel: bool,
) -> PreTrainedModel:
    """Load the weights to `device`. Experts that neither `pack` packs nor our kernel runs are dequantized."""
    options: dict[str, Any] = {
        "attn_implementation": transformers_hook.NAME,
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        if config.load_format == "dummy":
            torch.manual_seed(DUMMY_SEED)
            model = as_causal(make_model(hf_config, dtype=dtype, **options))
        elif quantization_config(hf_config) is not None:
            model = load_quantized(
                hf_source(config.model, config.revision),
                config.revision,
                hf_config,
                dtype,
                options,
                device,
                keeps_experts=pack is not None or has_kernel,
                packed=pack,
            )
        else:
            if device.type == "cuda" and is_accelerate_available():
                options["device_map"] = {"": device}  # as tensors are read, so the host need not hold all
            with memory_of_their_own():
                model = load_checkpoint(
                    config.model, hf_config, revision=config.revision, dtype=dtype, **options
                )
    except UnsupportedModelError:
        raise
    except OSError as error:
        raise ConfigError(f"--model: cannot load {config.model!r}: {error}") from error
    except (ValueError, ImportError) as error:  # some models need further packages
        raise UnsupportedModelError(f"{hf_config.model_type}: {error}") from error
    except KeyError as error:
        if error.args != (transformers_hook.NAME,):
            raise
        raise UnsupportedModelError(
            f"{hf_config.model_type}: attention that cannot be replaced by another is not supported"
        ) from error
    return model.to(device).eval().requires_grad_(False)


def _eos_token_ids(config: ServeConfig, model: PreTrainedModel, text_config: Any) -> list[int]:
    generation = getattr(model, "generation_config", None)
    if config.generation_config not in ("auto", "vllm"):
        generation = GenerationConfig.from_pretrained(config.generation_config)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


SAMPLES = 256
"""Number of elements sampled from each tensor; training changes nearly all elements."""

_OF_NO_CONSEQUENCE = ("_name_or_path", "transformers_version")


def model_fingerprint(model: PreTrainedModel, device_type: str) -> bytes:
    """Return 16 bytes made of the configuration, a sample of each tensor and the layers' input rounding."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_NO_CONSEQUENCE}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([config, device_type], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    groups = {name: getattr(module, "input_group", 0) for name, module in model.named_modules()}
    rounding = [f"{name} {group}" for name, group in groups.items() if group]
    digest.update("\n".join(rounding).encode())
    return digest.digest()
