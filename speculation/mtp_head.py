"""The MTP heads of a published checkpoint. A single head is a program if a family describes its layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoints.mtp_layouts import NUMBER, HeadLayout, find_layouts
from checkpoints.source import ASSISTANTS
from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend, LayerKv
from engine.kv.layout import DRAFT, Group
from engine.load.extra_layers import final_norm, load_extra_layers
from engine.load.select import modules_runner_of_head, runner_of_head
from engine.model.describe import describe
from engine.model.program import HeadInput, ModelProgram
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from protocol.speculation import SpeculativeConfig
from speculation.checkpoint import FIELD, Checkpoint
from speculation.drafter import Drafter
from speculation.gemma4_assistant import AssistantDrafter
from speculation.head_drafter import DraftHead, HeadDrafter, SeveralHeads

_FLAG = "--speculative-config: method mtp"


class MtpHeads(DraftHead):
    """The MTP heads. Each of `heads` has its decoder layers, the target's embedding and an LM head."""

    def __init__(self, heads: Sequence[LoadedModel], layout: HeadLayout, target: LoadedModel) -> None:
        self.heads, self.num_heads = heads, len(heads)
        self.hidden_layers = (target.num_layers,)
        self.feature_size = target.hidden_size
        self.kv_group = _joined([head.kv_group for head in heads])
        self._reads_target = layout.reads_target
        self._factors: Tensor | None = None
        if layout.before_norm:
            norm = final_norm(target.model.get_decoder())
            self._factors = norm(torch.ones_like(norm.weight)).to(target.device, target.dtype)

    def combine(self, features: Tensor) -> Tensor:
        """Undo the final norm's weights for heads that norm the state before it themselves."""
        if self._factors is None:
            return features
        return torch.where(self._factors == 0, 0, features / self._factors)

    def runner(
        self,
        config: ServeConfig,
        target: LoadedModel,
        kv: Sequence[LayerKv],
        backend: type[AttentionBackend],
    ) -> Runner:
        if self.num_heads > 1:
            size = len(kv) // self.num_heads
            heads = [
                modules_runner_of_head(
                    head.model, target, backend(kv[size * number :][:size]), hidden_of_all=True
                )
                for number, head in enumerate(self.heads)
            ]
            return SeveralHeads(heads, reads_target=self._reads_target)
        [head], model = self.heads, self.heads[0].model
        if head.program is None:
            return modules_runner_of_head(model, target, backend(kv))
        runner = runner_of_head(config, self.program, model, target.max_model_len, target, backend(kv))
        if runner.chains is not None:  # the runner has copied the weights
            entry: Any = model.entry
            for part in (*model.get_decoder().layers, entry.joint):
                part.to("meta")
        return runner

    def program(self) -> ModelProgram:
        """Return a single head's program, with its linear layers as they are now."""
        return mtp_program(self.heads[0].model)


def _joined(groups: Sequence[Group]) -> Group:
    """Return one group with the layers of all groups, which are alike."""
    first = groups[0]
    counts = [segment.num_layers for segment in first.segments]
    layers = [
        replace(place, index=place.index + number * counts[place.segment])
        for number, group in enumerate(groups)
        for place in group.layers
    ]
    return replace(
        first,
        name=DRAFT,
        segments=tuple(replace(each, num_layers=each.num_layers * len(groups)) for each in first.segments),
        layers=tuple(layers),
        layer_windows=tuple(window for group in groups for window in group.layer_windows),
    )


def mtp_program(layers: Any) -> ModelProgram:
    """Describe a head made by `engine.load.extra_layers`. Raise UndescribedModelError if no family fits."""
    described, entry = describe(layers), layers.entry
    like = described.final_norm or described.layers[0].input_norm
    assert like is not None
    norms = entry.token_norm, entry.hidden_norm
    token_norm, hidden_norm = (replace(like, weight=norm.weight) for norm in norms)
    parts = HeadInput(token_norm=token_norm, hidden_norm=hidden_norm, joint=entry.joint, feeds_normed=True)
    return replace(described, name="MTP head", entry=parts)


def mtp_drafter(options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> Drafter:
    """Make the drafter of the model's own heads, of other ones or of a Gemma 4 assistant."""
    assert options.model is not None
    checkpoint = Checkpoint(
        options.model, revision=config.revision if options.model == config.model else None
    )
    if checkpoint.config.get("model_type") in ASSISTANTS:
        return AssistantDrafter(checkpoint, options, config, target)
    return HeadDrafter(load_mtp(checkpoint, target, options), options, config)


def load_mtp(checkpoint: Checkpoint, target: LoadedModel, options: SpeculativeConfig) -> MtpHeads:
    """Load the heads that drafts need. Raise `ConfigError` that names the file and the tensor at fault."""
    try:
        layouts = find_layouts(checkpoint.names, target.num_layers)
    except LookupError as error:
        raise ConfigError(f"{_FLAG}: {checkpoint.folder}: {error}") from error
    format = None if options.quantization is None else CodeFormat(options.quantization)
    most = options.max_speculative_tokens if options.tree else options.fixed_tokens
    layouts = layouts[:most] or layouts[:1]
    heads = [_load(checkpoint, target, layout, number, format) for number, layout in enumerate(layouts)]
    if any(head.kv_group.segments != heads[0].kv_group.segments for head in heads):
        raise ConfigError(f"{_FLAG}: {checkpoint.folder}: its heads keep KV of several shapes")
    return MtpHeads(heads, layouts[0], target)


def _load(
    checkpoint: Checkpoint, target: LoadedModel, layout: HeadLayout, number: int, format: CodeFormat | None
) -> LoadedModel:
    tensors, count = _tensors(checkpoint, layout)
    method = checkpoint.config.get("quantization_config")
    faults = []
    for layer_types in _layer_types(target.model.config.get_text_config(decoder=True), number, count):
        try:
            return load_extra_layers(target, layer_types, tensors, method, format)
        except UnsupportedModelError as error:
            faults.append(error)
        except ValueError as error:
            raise ConfigError(f"{FIELD}: {error}") from error
    why = "; ".join(dict.fromkeys(map(str, faults))).replace("model.layers.0.", layout.block)
    for part, name in layout.parts.items():
        why = why.replace(f"entry.{part}.", f"{name}.")
    raise ConfigError(f"{_FLAG}: {checkpoint.folder}: {why}")


def _tensors(checkpoint: Checkpoint, layout: HeadLayout) -> tuple[dict[str, Tensor], int]:
    """Return the head's tensors as `load_extra_layers` names them, and the number of decoder layers."""
    found = {}
    block = re.compile(re.escape(layout.block).replace(re.escape(NUMBER), r"(\d+)"))
    own = {name: part for part, name in layout.parts.items()}
    count = 1
    for name in checkpoint.names:
        module, _, suffix = name.rpartition(".")
        if (part := own.get(module)) is not None:
            prefix = "" if part in ("final_norm", "lm_head") else "entry."
            found[f"{prefix}{part}.{suffix}"] = checkpoint.tensor(name)
        elif (match := block.match(name)) is not None:
            number = int(match[1]) if match.groups() else 0
            count = max(count, number + 1)
            ours = _renamed(name[match.end() :], layout.renamed)
            found[f"layers.{number}.{ours}"] = checkpoint.tensor(name)
    if layout.hidden_first:
        weight = found["entry.joint.weight"]
        found["entry.joint.weight"] = torch.cat([*reversed(weight.chunk(2, dim=1))], dim=1)
    return found, count


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name


def _layer_types(config: Any, head: int, count: int) -> list[list[str]]:
    """Return the types that a head's layers may have, likeliest first."""
    types = getattr(config, "mtp_layer_types", None) or getattr(config, "mtp_layers_block_type", None)
    if types:
        return [types[head * count :][:count]]
    kinds = dict.fromkeys(["full_attention", *(getattr(config, "layer_types", None) or ())])
    return [[kind] * count for kind in kinds if kind.endswith("attention") and kind != "linear_attention"]
