"""A loaded model with what serving it needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.kv.layout import Group
from engine.kv.state_slots import StateLayout
from engine.lora.table import Adapters
from engine.model.describe import UndescribedModelError, describe
from engine.model.program import ModelProgram


class RecurrentLayers(NamedTuple):
    """A model's recurrent layers: the hooks for our operators, and the layout of their states."""

    hooks: RecurrentHooks
    state: StateLayout


class Share(NamedTuple):
    """The part of a model that one of several tensor-parallel ranks runs."""

    program: ModelProgram
    """The rank's part of the model, on its device."""
    agree: Callable[[bool], bool]
    """Returns whether something is so on all ranks."""


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in eval mode on `device`, its attention routed to the paged pool. If the native decoder runs
    it, `description` has the packed program, and the model's layers have no weights.
    """

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    kv_group: Group
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    weights: str
    """A fingerprint that tells them from others of the same name, taken before they are packed."""
    description: NativeModel | None = None
    recurrent: RecurrentLayers | None = None
    adapters: Adapters | None = None
    """The adapters that it can run; None without `--enable-lora`."""
    in_ranks: bool = False
    """Whether some workers have tensor-parallel ranks. All run it alike, as they exchange KV."""
    expansion: str = ""
    """Why the pool has keys and values that it could keep as latents (`latent_attention`)."""
    share: Share | None = None
    """A rank's share, if ranks have KV pools of their own. `model` then is whole, on the host."""
    checkpoint: str = ""
    """How its checkpoint is quantized, and the form that it is run in; "" if it is not."""

    @property
    def program(self) -> ModelProgram | None:
        """The model's program; None if no family describes it. Made on demand: a kept one would keep weights
        that packing frees.
        """
        if self.share is not None:
            return self.share.program
        try:
            return describe(self.model)
        except UndescribedModelError:
            return None

    @property
    def num_layers(self) -> int:
        return self.model.config.get_text_config(decoder=True).num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config(decoder=True).hidden_size
