"""Writes small models that bring MTP heads in a published layout, and drafts with them in plain torch."""

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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.docs.tiny_shapes import tiny_config
from tests.e2e.architectures import config_of, write_model

_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")


def _beside(block: str, final_norm: str) -> tuple[str, ...]:
    return (f"{block}eh_proj", f"{block}enorm", f"{block}hnorm", f"{block}{final_norm}")


@dataclass(frozen=True)
class Family:
    """The published names of a head's joint product, its norms of token and hidden state and its final norm;
    the prefix of its layer's tensors, in which `0` is the layer's number if there are several; the fields by
    which a model of these layers alone differs. In names of several heads `{}` is a head's number.
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
    heads: tuple[int, ...] = (0,)
    reads_target: bool = False
    before_norm: bool = False
    lm_head: str | None = None

    def of(self, head: int) -> Family:
        parts = tuple(part.format(head) for part in self.parts)
        lm_head = None if self.lm_head is None else self.lm_head.format(head)
        return replace(self, parts=parts, block=self.block.format(head), lm_head=lm_head)


_FULL = {"layer_types": ["full_attention"]}
_LONG_NAMES = "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"
_MIMO = "model.mtp_layers.0."
_MIMO_V2, _BEHIND = "model.mtp.layers.{}.", "model.layers.{}."
SPECULATORS = Family("qwen3", tuple(f"mtp_layers.0.{name}" for name in _LONG_NAMES), "mtp_layers.0.")
FAMILIES = {
    "speculators": SPECULATORS,
    "qwen3_5": Family("qwen3_5_text", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "qwen3_5_moe": Family("qwen3_5_moe_text", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "qwen3_next": Family("qwen3_next", _QWEN, "mtp.layers.0.", _FULL, norm_offset=1.0),
    "deepseek_v3": Family(
        "deepseek_v3",
        _beside(_BEHIND, "shared_head.norm"),
        _BEHIND,
        {"first_k_dense_replace": 0},
        heads=(3, 4),
    ),
    "step3p7": Family(
        "step3p7",
        _beside(_BEHIND, "transformer.shared_head.norm"),
        _BEHIND,
        {
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
            "num_nextn_predict_layers": 0,
            "num_hidden_layers": 1,
        },
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
            + ["sliding_attention"] * 3,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "dense", "dense"],
            "num_nextn_predict_layers": 3,
            "num_hidden_layers": 3,
            "num_sliding_attention_heads": 6,
        },
        norm_offset=1.0,
        epsilon=1e-5,
        heads=(3, 4, 5),
        before_norm=True,
        lm_head=f"{_BEHIND}transformer.shared_head.output",
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
        tuple(_MIMO + name for name in _LONG_NAMES),
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
        heads=(0, 1, 2),
        reads_target=True,
        before_norm=True,
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
        (*_beside("mtp.layers.0.", "")[:3], "mtp.layers.1.final_layernorm"),
        "mtp.layers.0.",
        {"layer_types": ["full_attention", "moe"], "num_hidden_layers": 2},
        {**_MOE, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 48},
        epsilon=1e-5,
    ),
}


FAMILIES["step3p5"] = FAMILIES["step3p7"]
"""The same language model, with its configuration alone."""


@dataclass
class Published:
    """A family's model with its heads: `layers` are models of each head's layer alone, without a norm."""

    family: Family
    target: PreTrainedModel
    layers: list[PreTrainedModel]
    tensors: dict[str, Tensor]

    def draft(self, token_ids: list[int], count: int, lost: int | None = None) -> list[int]:
        """At the place `lost` all heads' hidden states are zeros."""
        drafted = list[int]()
        while len(drafted) < count:
            drafted.append(int(self.logits(token_ids, drafted, lost).argmax()))
        return drafted

    @torch.no_grad()
    def logits(self, token_ids: list[int], drafted: list[int], lost: int | None = None) -> Tensor:
        """Score the token after the drafted ones by the formula of DeepSeek-V3 (2024), section 2.2: all rows
        anew.
        """
        read, last = self._hidden(token_ids[:-1]), len(self.layers) - 1
        output = read
        for step in range(len(drafted) + 1):
            head = min(step, last)
            tokens = torch.tensor((token_ids + drafted[:step])[head + 1 :])
            if lost is not None:
                read = read.index_fill(0, torch.tensor(lost - head - 1), 0)
            output = self._run(head, self.target.get_input_embeddings()(tokens), read)
            if head == last:
                read = torch.cat([read, output[-1:]])
            elif not self.family.reads_target:
                read = output
        family = self.family.of(self.family.heads[min(len(drafted), last)])
        if family.lm_head is None:
            return self.target.get_output_embeddings()(output[-1])
        return linear(self._norm(family.parts[-1], output[-1]), self.tensors[f"{family.lm_head}.weight"])

    def _hidden(self, token_ids: list[int]) -> Tensor:
        norms = list[Tensor]()
        norm = dict(self.target.get_decoder().named_children()).get("norm", torch.nn.Identity())
        hook = norm.register_forward_pre_hook(lambda _, args: norms.append(args[0]))
        output = self.target(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
        hook.remove()
        return norms[0][0] if self.family.before_norm else output.hidden_states[-1][0]

    def _run(self, head: int, embeddings: Tensor, hidden: Tensor) -> Tensor:
        family = self.family.of(self.family.heads[head])
        joint, token_norm, hidden_norm, *final = family.parts
        both = [self._norm(token_norm, embeddings), self._norm(hidden_norm, hidden)]
        both = both[::-1] if family.hidden_first else both
        x = linear(torch.cat(both, dim=-1), self.tensors[f"{joint}.weight"])
        decoder: Any = self.layers[head].get_decoder()
        output = decoder(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return self._norm(final[0], output) if final and family.lm_head is None else output

    def _norm(self, name: str, x: Tensor) -> Tensor:
        normed = x * (x.pow(2).mean(-1, keepdim=True) + self.family.epsilon).rsqrt()
        return normed * (self.family.norm_offset + self.tensors[f"{name}.weight"])


def publish(name: str, folder: Path) -> Published:
    """Write the family's model into `folder`, its heads' tensors in a file of their own."""
    family = FAMILIES[name]
    if family.model_type == "step3p7":
        _write_whole(family, folder)
    else:
        write_model(family.model_type, folder, **family.target)
    target = _auto(family).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    changes = {"num_hidden_layers": 1} | family.target | family.layer
    made = [make_head(family.of(head), _config(family, changes), head) for head in family.heads]
    tensors = {name: tensor for _, own in made for name, tensor in own.items()}
    _add(folder, tensors)
    if name == "step3p5":
        text = json.loads((folder / "config.json").read_text())["text_config"]
        (folder / "config.json").write_text(json.dumps(text))
    return Published(family, target.eval(), [layer for layer, _ in made], tensors)


def _auto(family: Family) -> Any:
    return AutoModelForMultimodalLM if family.model_type == "step3p7" else AutoModelForCausalLM


def _config(family: Family, changes: dict[str, Any]) -> PreTrainedConfig:
    if family.model_type != "step3p7":
        return config_of(family.model_type, **changes)
    whole = tiny_config(family.model_type)
    text = {**whole.text_config.to_dict(), "per_layer_config": None, "rope_parameters": None, **changes}
    text = {name: value for name, value in text.items() if value is not None}
    return type(whole)(text_config=text, vision_config=whole.vision_config.to_dict())


def _write_whole(family: Family, folder: Path) -> None:
    torch.manual_seed(11)
    _auto(family).from_config(_config(family, family.target), dtype=torch.float32).save_pretrained(folder)


def make_head(
    family: Family, config: PreTrainedConfig, seed: int = 0
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a model of a random head's layer alone, without its norm, and the head's published tensors."""
    torch.manual_seed(12 + seed)
    layer = _auto(family).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with TemporaryDirectory() as folder:
        layer.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    text = config.get_text_config()
    size = text.hidden_size
    tensors = {
        f"{part}.weight": torch.randn(size) * 0.2 + 1 - family.norm_offset for part in family.parts[1:]
    }
    tensors[f"{family.parts[0]}.weight"] = torch.randn(size, 2 * size) * 0.2
    if family.lm_head is not None:
        tensors[f"{family.lm_head}.weight"] = torch.randn(text.vocab_size, size) * 0.2
    for own, tensor in stored.items():
        if match := re.match(r"(?:model|backbone)\.layers\.(\d+)\.", own):
            name = own[match.end() :]
            for ours, theirs in family.renamed.items():
                name = name.replace(ours, theirs)
            block = family.block if text.num_hidden_layers == 1 else family.block.replace("0", match[1])
            tensors[block + name] = tensor
    decoder = layer.get_decoder()
    setattr(decoder, "norm_f" if hasattr(decoder, "norm_f") else "norm", torch.nn.Identity())
    return layer.eval(), tensors


def publish_beside(target: PreTrainedModel, folder: Path, norm_offset: float = 0.0) -> Published:
    """Write a random head for any model into a folder of its own, as the library Speculators does."""
    config = AutoConfig.from_pretrained(target.config._name_or_path)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    family = replace(SPECULATORS, norm_offset=norm_offset)
    layer, tensors = make_head(family, config)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    return Published(family, target, [layer], tensors)


def write_head(target: Path, folder: Path) -> Path:
    publish_beside(AutoModelForCausalLM.from_pretrained(target), folder, norm_offset=1.0)
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
    for path, module in published.layers[0].model.layers[0].named_modules():
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
