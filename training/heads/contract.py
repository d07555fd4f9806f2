"""The contract between the training loop and a method whose heads it trains."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from protocol.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """The model that heads are trained for: frozen, in eval mode, its attention Transformers' own.

    `token_counts` [vocab_size], int64, says how often each token occurs in the training data.
    """

    name: str
    model: PreTrainedModel
    token_counts: Tensor

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return int(self._config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self._config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._config.vocab_size)

    @property
    def logit_scale(self) -> float:
        """What the model multiplies its head's output with (Cohere's and Granite's do)."""
        multiplier = getattr(self._config, "logit_scale", None) or 1.0
        divisor = getattr(self._config, "logits_scaling", None) or 1.0
        return float(multiplier / divisor)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits [..., vocab_size] after tokens with these final hidden states, those of
        layer `num_layers`.
        """
        logits = self.model.get_output_embeddings()(hidden) * self.logit_scale
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def frequent_tokens(self, count: int) -> Tensor:
        """The ids of so many tokens, ascending: int64 [count]. Raises `ConfigError`."""
        if count > self.vocab_size:
            raise ConfigError(f"--draft-vocab-size: {count} exceeds the model's {self.vocab_size} tokens")
        return self.token_counts.topk(count).indices.sort().values.to(self.device)

    @property
    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


@dataclass(frozen=True)
class HeadOptions:
    """What a user may choose of the heads' shape; None leaves it to the method.

    `depth`: how many tokens ahead they are trained to draft. `num_layers`: of each head.
    `draft_vocab_size`: only so many of the most frequent tokens can be drafted.
    """

    depth: int | None = None
    num_layers: int | None = None
    draft_vocab_size: int | None = None


class TrainableHead(ABC):
    """Heads in training. The loop owns the optimizer, the data and the checkpoints.

    `module` holds, as float32 parameters on the target's device, exactly what is learned: its `state_dict`
    is a checkpoint of the training. Buffers that follow from the target should not be persistent.
    `hidden_layers` are those that `loss` and `draft` are given, in Transformers' numbering; they may be more
    than serving needs (the last one, for the target's own logits).
    """

    module: nn.Module
    hidden_layers: tuple[int, ...]
    depth: int

    @abstractmethod
    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """A scalar to minimize. `token_ids` [windows, length], int64; `hidden` [windows, length, captured
        layers * hidden_size], in the target's dtype: those after each token.
        """

    @abstractmethod
    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """The chains that would be drafted greedily: int64 [windows, len(places), depth].

        At place p, tokens to place p + 1 are committed and hidden states to place p are there, so that
        entry i is for place p + 2 + i; what comes later in a window must not be looked at. Called without
        gradients; `places` ascend and are below length - 1.
        """

    def calibrate(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> None:  # noqa: B027
        """For heads that note for serving how good they are: called after the training, before `save`.

        Arguments as for `draft`. The windows go on from `places[0] + 1` with what the target itself says
        after held-out text.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json and the tensors in the published format, in the target's dtype."""


def write_head(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
