"""Loads a Transformers decoder and finds out, by running it once, whether the engine can serve it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.attention import transformers_hook
from engine.errors import UnsupportedModelError
from engine.kv_pool import KVShape
from protocol.config import ServeConfig
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")

DUMMY_SEED = 0
"""Workers with `--load-format dummy` must make the same weights."""


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in eval mode on `device`, its attention routed to the paged pool."""

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    kv_shape: KVShape
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]


def load_model(config: ServeConfig) -> LoadedModel:
    """Raises `UnsupportedModelError` or `ConfigError`, naming what is wrong."""
    device = choose_device(config.device)
    transformers_hook.register()
    hf_config = _load_hf_config(config)
    dtype = choose_dtype(config.dtype, hf_config, device)
    model = _load_weights(config, hf_config, dtype, device)
    text_config = hf_config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        kv_shape=_probe(model, device, dtype, text_config.num_hidden_layers),
        vocab_size=text_config.vocab_size,
        max_model_len=choose_max_model_len(config.max_model_len, text_config),
        eos_token_ids=_eos_token_ids(model, text_config),
    )


def choose_device(requested: str) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: cuda was asked for, but this host has no usable CUDA device")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested)


def choose_dtype(requested: str, hf_config: Any, device: torch.device) -> torch.dtype:
    if requested != "auto":
        return getattr(torch, requested)
    stored = getattr(hf_config, "dtype", None) or torch.float32
    if stored is torch.float16 and device.type == "cpu":
        return torch.bfloat16
    return stored


def choose_max_model_len(requested: int | None, text_config: Any) -> int:
    longest = getattr(text_config, "max_position_embeddings", None)
    if longest is None:
        if requested is None:
            raise ConfigError("--max-model-len: the model does not say its longest sequence; give one")
        return requested
    if requested is not None and requested > longest:
        raise ConfigError(f"--max-model-len: {requested} exceeds the model's {longest} positions")
    return requested or longest


def _load_hf_config(config: ServeConfig) -> Any:
    try:
        hf_config = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot load {config.model!r}: {error}") from error
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{hf_config.model_type}: encoder-decoder models are not supported")
    return hf_config


def _load_weights(
    config: ServeConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    options = {"attn_implementation": transformers_hook.NAME, "trust_remote_code": config.trust_remote_code}
    try:
        if config.load_format == "dummy":
            torch.manual_seed(DUMMY_SEED)
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                config.model, config=hf_config, revision=config.revision, dtype=dtype, **options
            )
    except OSError as error:
        raise ConfigError(f"--model: cannot load {config.model!r}: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{hf_config.model_type}: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def _eos_token_ids(model: PreTrainedModel, text_config: Any) -> list[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


class _Recorder:
    """Stands in for the attention backend and notes what each layer asks for."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} runs attention more than once in a forward")
        self.shapes[layer] = (key.shape[1], key.shape[2])
        return torch.zeros_like(query)


def _probe(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, num_layers: int) -> KVShape:
    """Run two packed tokens; every layer must attend once, through our function, with KV of one shape."""
    name = model.config.model_type
    recorder = _Recorder()
    transformers_hook.set_current_backend(recorder)  # type: ignore[arg-type]
    positions = torch.arange(2, device=device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
            )
    except (TypeError, AttributeError) as error:
        raise UnsupportedModelError(f"{name}: cannot run packed tokens: {error}") from error
    finally:
        transformers_hook.set_current_backend(None)
    missing = sorted(set(range(num_layers)) - set(recorder.shapes))
    if missing:
        raise UnsupportedModelError(
            f"{name}: layers {missing} do not use the attention interface (recurrent state or attention of "
            "their own), which is not supported"
        )
    if len(set(recorder.shapes.values())) != 1:
        raise UnsupportedModelError(f"{name}: layers with KV of different shapes are not supported")
    num_kv_heads, head_dim = recorder.shapes[0]
    return KVShape(num_layers, num_kv_heads, head_dim, dtype)
