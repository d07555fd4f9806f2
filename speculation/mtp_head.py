"""The MTP head of a published checkpoint. It runs as a program where a family describes its layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoints.mtp_layouts import NUMBER, Layout, find_layout
from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.errors import UnsupportedModelError
from engine.kv.attention import AttentionBackend
from engine.kv.layout import DRAFT
from engine.load.extra_layers import load_extra_layers
from engine.load.select import modules_runner_of_head, runner_of_head
from engine.model.describe import describe
from engine.model.program import Entry, ModelProgram
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import Quantization
from speculation.checkpoint import FIELD, Checkpoint
from speculation.draft_head import DraftHead

_FLAG = "--speculative-config: method mtp"


class MtpHead(DraftHead):
    """`layers` are a model of the head's decoder layers alone, over the target's embedding and LM head."""

    def __init__(self, layers: LoadedModel, target: LoadedModel) -> None:
        self.layers = layers
        self.hidden_layers = (target.num_layers,)
        self.feature_size = target.hidden_size
        self.kv_group = replace(layers.kv_group, name=DRAFT)

    def runner(self, config: ServeConfig, target: LoadedModel, backend: AttentionBackend) -> Runner:
        model: Any = self.layers.model
        if self.layers.program is None:
            return modules_runner_of_head(model, target, backend)
        runner = runner_of_head(config, self.program, model, target.max_model_len, target, backend)
        if runner.chains is not None:  # it has copied the weights
            for part in (*model.get_decoder().layers, model.entry.joint):
                part.to("meta")
        return runner

    def program(self) -> ModelProgram:
        """Return the head's program with its linear layers as they are now. A family must describe them."""
        return mtp_program(self.layers.model)


def mtp_program(layers: Any) -> ModelProgram:
    """Describe a head that `engine.load.extra_layers` has made. Raises UndescribedModelError."""
    described, entry = describe(layers), layers.entry
    like = described.final_norm or described.layers[0].input_norm
    assert like is not None
    norms = entry.token_norm, entry.hidden_norm
    token_norm, hidden_norm = (replace(like, weight=norm.weight) for norm in norms)
    parts = Entry(token_norm=token_norm, hidden_norm=hidden_norm, joint=entry.joint, feeds_normed=True)
    return replace(described, name="MTP head", entry=parts)


def load_mtp(checkpoint: Checkpoint, target: LoadedModel, quantization: Quantization | None) -> MtpHead:
    """Load the head that a checkpoint has, the served model's own in most cases. Raises `ConfigError` that
    names the file and the tensor that is missing or does not fit.
    """
    try:
        layout = find_layout(checkpoint.names, target.num_layers)
    except LookupError as error:
        raise ConfigError(f"{_FLAG}: {checkpoint.folder}: {error}") from error
    tensors, count = _tensors(checkpoint, layout)
    format = None if quantization is None else CodeFormat(quantization)
    faults = []
    for layer_types in _layer_types(target.model.config, count):
        try:
            layers = load_extra_layers(
                target, layer_types, tensors, checkpoint.config.get("quantization_config"), format
            )
        except UnsupportedModelError as error:
            faults.append(error)
        except ValueError as error:
            raise ConfigError(f"{FIELD}: {error}") from error
        else:
            return MtpHead(layers, target)
    why = "; ".join(dict.fromkeys(map(str, faults))).replace("model.layers.0.", layout.block)
    for part, name in layout.parts.items():
        why = why.replace(f"entry.{part}.", f"{name}.")
    raise ConfigError(f"{_FLAG}: {checkpoint.folder}: {why}")


def _tensors(checkpoint: Checkpoint, layout: Layout) -> tuple[dict[str, Tensor], int]:
    """Return the head's tensors as `load_extra_layers` names them, and the number of decoder layers."""
    found = {}
    block = re.compile(re.escape(layout.block).replace(re.escape(NUMBER), r"(\d+)"))
    own = {name: part for part, name in layout.parts.items()}
    count = 1
    for name in checkpoint.names:
        module, _, suffix = name.rpartition(".")
        if (part := own.get(module)) is not None:
            prefix = "" if part == "final_norm" else "entry."
            found[f"{prefix}{part}.{suffix}"] = checkpoint.tensor(name)
        elif (match := block.match(name)) is not None:
            number = int(match[1]) if match.groups() else 0
            count = max(count, number + 1)
            found[f"layers.{number}.{_renamed(name[match.end() :], layout.renamed)}"] = checkpoint.tensor(
                name
            )
    if layout.hidden_first:
        weight = found["entry.joint.weight"]
        found["entry.joint.weight"] = torch.cat([*reversed(weight.chunk(2, dim=1))], dim=1)
    return found, count


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        name = name.replace(theirs, ours)
    return name


def _layer_types(config: Any, count: int) -> list[list[str]]:
    """Return the types that the head's layers may have, likeliest first."""
    given = getattr(config, "mtp_layer_types", None) or getattr(config, "mtp_layers_block_type", None)
    if given:
        return [given[:count]]
    kinds = dict.fromkeys(["full_attention", *(getattr(config, "layer_types", None) or ())])
    return [[kind] * count for kind in kinds if kind.endswith("attention") and kind != "linear_attention"]
