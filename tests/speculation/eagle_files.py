"""Writes small EAGLE heads in the published formats, with random weights, for `write_target`'s model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB, WIDTH, LAYERS, THETA = 160, 32, 8, 5_000.0
HEADS, KV_HEADS, HEAD_DIM, FFN, DRAFT_VOCAB = 4, 2, 8, 48, 60
MAX_POSITIONS = 512


def write_target(folder: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=0,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@dataclass
class Published:
    """A checkpoint's content and its expected reading. `captured` uses Transformers' numbering."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    captured: tuple[int, ...]
    is_eagle3: bool
    flags: dict[str, Any] = field(default_factory=dict)
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".bin"):
            torch.save(self.tensors, folder / self.file)
        else:
            save_file(self.tensors, folder / self.file)
        return folder


def _layer(prefix: str, width: int, joined: int, random: torch.Generator) -> dict[str, Tensor]:
    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.3

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(queries, joined),
        f"{prefix}.self_attn.k_proj.weight": weight(keys, joined),
        f"{prefix}.self_attn.v_proj.weight": weight(keys, joined),
        f"{prefix}.self_attn.o_proj.weight": weight(width, queries),
        f"{prefix}.mlp.gate_proj.weight": weight(FFN, width),
        f"{prefix}.mlp.up_proj.weight": weight(FFN, width),
        f"{prefix}.mlp.down_proj.weight": weight(width, FFN),
        f"{prefix}.post_attention_layernorm.weight": 1 + weight(width),
    }


def _layer_config(width: int = WIDTH, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    } | fields


def _embedding(target: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model.get_input_embeddings().weight.detach().clone()


def eagle1(target: Path, *, bias: bool = True, file: str = "pytorch_model.bin") -> Published:
    random = torch.Generator().manual_seed(1)
    tensors = _layer("layers.0", WIDTH, WIDTH, random)
    tensors["fc.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=random) * 0.3
    if bias:
        tensors["fc.bias"] = torch.randn(WIDTH, generator=random)
    tensors["embed_tokens.weight"] = _embedding(target)
    config = _layer_config(architectures=["LlamaForCausalLM"], rope_theta=THETA) | (
        {} if bias else {"bias": False}
    )
    return Published(config, tensors, (LAYERS,), is_eagle3=False, file=file)


def eagle3(
    prefix: str = "midlayer",
    *,
    width: int = WIDTH,
    captured: tuple[int, ...] = (2, LAYERS // 2, LAYERS - 3),
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    mixes: bool = True,
    head_norms: bool = False,
    reduced: bool = True,
    theta: float | None = THETA,
    **fields: Any,
) -> Published:
    """Write the official layout. The head has its own embedding if its width differs from the target's."""
    random = torch.Generator().manual_seed(2)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.3

    tensors = _layer(prefix, width, 2 * width, random)
    for norm in ("hidden_norm", "input_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = 1 + weight(width)
    if head_norms:
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": 1 + weight(HEAD_DIM) for name in "qk"}
    if mixes:
        tensors["fc.weight"] = weight(width, len(captured) * WIDTH)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": 1 + weight(WIDTH) for i in range(len(captured))}
    if norm_before_fc:
        tensors["input_norm.weight"] = 1 + weight(len(captured) * WIDTH)
    tensors["norm.weight"] = 1 + weight(width)
    size = DRAFT_VOCAB if reduced else VOCAB
    tensors["lm_head.weight"] = weight(size, width)
    config = _layer_config(width, architectures=["LlamaForCausalLM"], draft_vocab_size=size)
    if theta is not None:
        config["rope_theta"] = theta
    if width != WIDTH:
        tensors["embed_tokens.weight"] = weight(VOCAB, width)
        config["target_hidden_size"] = WIDTH
    if reduced:
        ids = torch.randperm(VOCAB, generator=random)[:size].sort().values
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    flags = {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    config |= {name: True for name, on in flags.items() if on}
    return Published(config | fields, tensors, captured, is_eagle3=True, flags=flags)


def specforge(**options: Any) -> Published:
    """Write SpecForge's layout. Its layer ids are one less than Transformers' numbers."""
    published = eagle3(captured=(2, 4, 6), **options)
    published.config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    }
    return published


def speculators(**options: Any) -> Published:
    """Write speculators' layout: a nested layer config, and Transformers' layer numbers."""
    published = eagle3("layers.0", captured=(1, 4, 6), norm_before_residual=True, **options)
    layer = {name: published.config[name] for name in (*_layer_config(), "rope_theta")}
    published.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": published.config["draft_vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
    } | {name: True for name, on in published.flags.items() if on}
    return published


def without_aux() -> Published:
    """Write a head that reads only the last hidden state and has no fc."""
    published = eagle3(captured=(LAYERS,), mixes=False)
    published.config["eagle_config"] = {"use_aux_hidden_state": False}
    return published
