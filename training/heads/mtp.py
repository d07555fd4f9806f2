"""Multi-token prediction heads in training: a decoder layer of the target's own kind, as published
checkpoints have (DeepSeek-V3, 2024, section 2.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints.mtp_layouts import LAYOUTS
from engine.devices.torch import transformers_hook
from engine.load.extra_layers import make_layers
from engine.model.describe import UndescribedModelError
from engine.model.program import ModelProgram
from protocol.errors import ConfigError
from speculation.mtp_head import mtp_program
from training.heads.contract import HeadOptions, Target, write_head
from training.heads.eagle import DRAFT_VOCABULARY
from training.heads.unrolled import DEFAULT_DEPTH, UnrolledTraining

_QWEN = "qwen3_5", "qwen3_next"
"""The families with a layout of their own, by `model_type`. Others get the Speculators format."""


def build_mtp(target: Target, options: HeadOptions) -> MtpTraining:
    """Build a head of one layer. Raises `ConfigError` that names the option."""
    size = options.draft_vocab_size or min(DRAFT_VOCABULARY, target.vocab_size)
    try:
        return MtpTraining(target, options.depth or DEFAULT_DEPTH, size)
    except UndescribedModelError as error:
        raise ConfigError(f"--method: mtp does not train a head for {target.name}: {error}") from error


class MtpTraining(UnrolledTraining):
    """An MTP head in training. Starts from the target's last layer of the same kind. Learns to draft the
    `draft_vocab_size` tokens best, though it can draft all tokens.
    """

    def __init__(self, target: Target, depth: int, draft_vocab_size: int) -> None:
        transformers_hook.register()
        with target.device:
            layers: Any = make_layers(target.model, ["full_attention"], torch.float32)
        layers.requires_grad_(True).train()
        decoder = layers.get_decoder()
        _start_as(target, decoder)
        parts = {
            "block": decoder.layers[0],
            "final_norm": decoder.norm,
            **dict(layers.entry.named_children()),
        }

        def describe(embedding: nn.Module, lm_head: nn.Module) -> ModelProgram:
            layers.set_input_embeddings(embedding)
            layers.set_output_embeddings(lm_head)
            return mtp_program(layers)

        super().__init__(target, nn.ModuleDict(parts), (), depth, draft_vocab_size, own_lm_head=False)
        positions = target.config.max_position_embeddings + depth
        self.run_by(describe, lambda hidden: hidden, positions)

    def save(self, folder: Path) -> None:
        """Save in the layout of the target's family. The LM head and the embedding are the target's."""
        is_qwen = str(self._target.config.model_type).startswith(_QWEN)
        layout = LAYOUTS["Qwen3-Next, Qwen3.5" if is_qwen else "Speculators"].of(
            self._target.config.num_hidden_layers
        )
        names = {f"{part}.": f"{name}." for part, name in layout.parts.items()} | {"block.": layout.block}
        config: dict[str, Any] = self._target.config.to_diff_dict()
        if is_qwen:
            name = type(self._target.model).__name__.replace("ForCausalLM", "MTP")
            config |= {"architectures": [name], "mtp_num_hidden_layers": 1}
        else:
            config = {
                "speculators_model_type": "mtp",
                "transformer_layer_config": config,
                "num_nextn_predict_layers": 1,
            }
        write_head(folder, config, {_renamed(name, names): tensor for name, tensor in self.head_tensors()})


def _start_as(target: Target, decoder: Any) -> None:
    """Copy the target's last layer that has the same tensors, if any, and its final norm."""
    theirs: Any = target.model.get_decoder()
    names = decoder.layers[0].state_dict().keys()
    alike = [layer.state_dict() for layer in theirs.layers if layer.state_dict().keys() == names]
    if alike:
        decoder.layers[0].load_state_dict(alike[-1])
    decoder.norm.load_state_dict(theirs.norm.state_dict())


def _renamed(name: str, names: dict[str, str]) -> str:
    prefix = next(prefix for prefix in names if name.startswith(prefix))
    return names[prefix] + name.removeprefix(prefix)
