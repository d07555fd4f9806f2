"""Writes small models that bring an MTP head in a published layout, and drafts with it in plain torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.e2e.architectures import config_of, write_model

_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def _beside(block: str, final_norm: str) -> tuple[str, ...]:
    return (f"{block}eh_proj", f"{block}enorm", f"{block}hnorm", f"{block}{final_norm}")


@dataclass(frozen=True)
class Family:
    """The published names of a head's joint product, its norms of token and hidden state and its final norm;
    the prefix of its layer's tensors, in which `0` is the layer's number if there are several; the fields by
    which a model of these layers alone differs.
    """

    model_type: str
    parts: tuple[str, ...]
    block: str
    layer: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    hidden_first: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    epsilon: float = 1e-6


_FULL = {"layer_types": ["full_attention"]}
_LONG_NAMES = "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"
_MIMO = "model.mtp_layers.0."
_MIMO_V2 = "model.mtp.layers.0."
SPECULATORS = Family("qwen3", tuple(f"mtp_layers.0.{name}" for name in _LONG_NAMES), "mtp_layers.0.")
FAMILIES = {
    "speculators": SPECULATORS,
    "qwen3_5": Family("qwen3_5_text", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "qwen3_5_moe": Family("qwen3_5_moe_text", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "qwen3_next": Family("qwen3_next", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "deepseek_v3": Family(
        "deepseek_v3",
        _beside("model.layers.3.", "shared_head.norm"),
        "model.layers.3.",
        {"first_k_dense_replace": 0},
    ),
    "glm4_moe": Family(
        "glm4_moe",
        _beside("model.layers.3.", "shared_head.norm"),
        "model.layers.3.",
        {"first_k_dense_replace": 0},
        {**_MOE, "n_routed_experts": 4, "attention_bias": True, "use_qk_norm": True},
        epsilon=1e-5,
    ),
    "hy_v3": Family(
        "hy_v3",
        _beside("model.layers.3.", "final_layernorm"),
        "model.layers.3.",
        {"mlp_layer_types": ["sparse"]},
        _MOE,
    ),
    "mimo": Family(
        "qwen2",
        tuple(
            _MIMO + name for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        ),
        _MIMO,
        {"use_sliding_window": False},
        {"use_sliding_window": False},
        hidden_first=True,
    ),
    "mimo_v2": Family(
        "mimo_v2_flash",
        _beside(_MIMO_V2, "final_layernorm"),
        _MIMO_V2,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        renamed={
            "post_attention_layernorm": "pre_mlp_layernorm",
            "self_attn.sinks": "self_attn.attention_sink_bias",
        },
        epsilon=1e-5,
    ),
    "ernie": Family(
        "ernie4_5_moe",
        ("model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
        "model.mtp_block.0.",
        {"moe_layer_start_index": 1},
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 48},
        epsilon=1e-5,
    ),
    "nemotron": Family(
        "nemotron_h",
        (
            "mtp.layers.0.eh_proj",
            "mtp.layers.0.enorm",
            "mtp.layers.0.hnorm",
            "mtp.layers.1.final_layernorm",
        ),
        "mtp.layers.0.",
        {"layer_types": ["full_attention", "moe"], "num_hidden_layers": 2},
        {**_MOE, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48},
        epsilon=1e-5,
    ),
}


@dataclass
class Published:
    """A family's model with its head: `layer` is a model of the head's layer alone, without a norm."""

    family: Family
    target: PreTrainedModel
    layer: PreTrainedModel
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def draft(self, token_ids: list[int], count: int, first_row: int = 0) -> list[int]:
        """Draft greedily by the formula of DeepSeek-V3 (2024), section 2.2: for each token all rows anew."""
        hidden = self.target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        hidden, drafted = hidden[first_row:], list[int]()
        while len(drafted) < count:
            tokens = torch.tensor((token_ids + drafted)[first_row + 1 :])
            output = self._run(self.target.get_input_embeddings()(tokens), hidden)
            hidden = torch.cat([hidden, output[-1:]])
            drafted.append(int(self.target.get_output_embeddings()(output[-1]).argmax()))
        return drafted

    def _run(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        joint, token_norm, hidden_norm, *final = self.family.parts
        both = [self._norm(token_norm, embeddings), self._norm(hidden_norm, hidden)]
        both = both[::-1] if self.family.hidden_first else both
        x = linear(torch.cat(both, dim=-1), self.tensors[f"{joint}.weight"])
        output = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return self._norm(final[0], output) if final else output

    def _norm(self, name: str, x: Tensor) -> Tensor:
        normed = x * (x.pow(2).mean(-1, keepdim=True) + self.family.epsilon).rsqrt()
        return normed * (self.family.norm_offset + self.tensors[f"{name}.weight"])


def publish(name: str, folder: Path) -> Published:
    """Write the family's model into `folder`, its head's tensors in a file of their own."""
    family = FAMILIES[name]
    write_model(family.model_type, folder, **family.target)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = config_of(family.model_type, **({"num_hidden_layers": 1} | family.target | family.layer))
    layer, tensors = make_head(family, config)
    _add(folder, tensors)
    return Published(family, target.eval(), layer, tensors)


def make_head(family: Family, config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a model of a random head's layer alone, without its norm, and the head's published tensors."""
    torch.manual_seed(12)
    layer = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with TemporaryDirectory() as folder:
        layer.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    size = config.hidden_size
    tensors = {
        f"{part}.weight": torch.randn(size) * 0.2 + 1 - family.norm_offset for part in family.parts[1:]
    }
    tensors[f"{family.parts[0]}.weight"] = torch.randn(size, 2 * size) * 0.2
    for own, tensor in stored.items():
        if match := re.match(r"(?:model|backbone)\.layers\.(\d+)\.", own):
            name = own[match.end() :]
            for ours, theirs in family.renamed.items():
                name = name.replace(ours, theirs)
            tensors[family.block.replace("0", match[1]) + name] = tensor
    setattr(layer.model, "norm_f" if hasattr(layer.model, "norm_f") else "norm", torch.nn.Identity())
    return layer.eval(), tensors


def write_head(target: Path, folder: Path) -> Path:
    """Write a random head for any model into a folder of its own, as the library Speculators does."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    _, tensors = make_head(replace(SPECULATORS, norm_offset=1.0), config)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    return folder


def _add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add a file of tensors to a checkpoint of one file."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    store(folder, tensors)


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the head's tensors anew."""
    save_file(tensors, folder / "model-2.safetensors", metadata={"format": "pt"})
    names = load_file(folder / "model-1.safetensors")
    weight_map = dict.fromkeys(names, "model-1.safetensors") | dict.fromkeys(tensors, "model-2.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@torch.no_grad()
def quantize(published: Published, folder: Path) -> None:
    """Store the layer's linear layers in FP8 with a scale for each block of 32 times 32 weights."""
    stored = dict(published.tensors)
    for path, module in published.layer.model.layers[0].named_modules():
        name = f"{published.family.block}{path}.weight"
        if isinstance(module, torch.nn.Linear):
            blocks = module.weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
            scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            module.weight.copy_((codes.float() * scales).view_as(module.weight))
            stored[name] = codes.view_as(module.weight)
            stored[name + "_scale_inv"] = scales[:, 0, :, 0].contiguous()
    store(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))
