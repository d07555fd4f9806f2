"""The contract between the training loop and a kind of heads, and the measurement of acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from protocol.errors import ConfigError
from training.data import Windows, fast_dtype
from training.output import save_tensors, write_json
from training.recording import Recorded, Recording


@dataclass(frozen=True)
class Target:
    """The frozen model that heads draft for. Only its embeddings and its LM head are used.

    `token_counts` [vocab_size], int64, counts each token that heads should draft in the training data.
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
    def computes_in(self) -> torch.dtype:
        """The dtype of the matrix products in a training step."""
        return fast_dtype(self.dtype, self.device)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def logit_scale(self) -> float:
        """Return the factor on the LM head's output, which Cohere and Granite have; else 1."""
        multiplier = getattr(self.config, "logit_scale", None) or 1.0
        divisor = getattr(self.config, "logits_scaling", None) or 1.0
        return float(multiplier / divisor)

    def lm_head(self, token_ids: Tensor) -> Tensor:
        """Return the LM head's rows for these tokens, scaled: float32 [tokens, hidden_size]."""
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight[token_ids].float() * self.logit_scale

    def logits(self, hidden: Tensor, lm_head: Tensor) -> Tensor:
        """Return float32 logits of these rows of `lm_head` from hidden states after layer `num_layers`."""
        logits = nn.functional.linear(hidden.to(self.computes_in), lm_head.to(self.computes_in)).float()
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def frequent_tokens(self, count: int) -> Tensor:
        """Return the `count` most frequent tokens, ascending: int64 [count]. Raises `ConfigError`."""
        if count > self.vocab_size:
            raise ConfigError(f"--draft-vocab-size: {count} exceeds the model's {self.vocab_size} tokens")
        most = self.token_counts.argsort(descending=True, stable=True)[:count]
        return most.sort().values.to(self.device)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)


@dataclass(frozen=True)
class HeadOptions:
    """The user's choices of the heads' shape; None leaves a choice to the method.

    `depth`: number of tokens that the heads are trained to draft. `num_layers`: layers of each head.
    `draft_vocab_size`: number of tokens that can be drafted, the most frequent ones.
    """

    depth: int | None = None
    num_layers: int | None = None
    draft_vocab_size: int | None = None

    def check(self, kind: str, most_depth: int, most_layers: int) -> None:
        """Raise `ConfigError` if heads of this kind cannot have this depth or number of layers."""
        most = {"--depth": (self.depth, most_depth), "--num-layers": (self.num_layers, most_layers)}
        for flag, (asked, limit) in most.items():
            if asked is not None and asked > limit:
                raise ConfigError(f"{flag}: at most {limit} for {kind} heads, got {asked}")


class TrainableHead(ABC):
    """Heads in training. The loop owns the optimizer, the data and the checkpoints.

    `module` holds the learned parameters, and no others, as float32 on the target's device: its `state_dict`
    is a training checkpoint. Buffers derived from the target should not be persistent. `hidden_layers` are
    the layers whose hidden states `loss` and `draft` get, in Transformers' numbering; they may include layers
    that serving does not need, such as the last one for the target's logits.
    """

    module: nn.Module
    hidden_layers: tuple[int, ...]
    depth: int

    @abstractmethod
    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return a scalar to minimize. `token_ids` [windows, length], int64; `hidden` [windows, length,
        captured layers * hidden_size], bfloat16 or float32: the hidden states after each token.
        """

    @abstractmethod
    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the chains that greedy drafting would produce: int64 [windows, len(places), depth].

        At place p, the tokens up to place p + 1 are committed and the hidden states up to place p are known,
        so entry i is for place p + 2 + i. Later parts of a window must not be read. Called without
        gradients; `places` ascend and are below length - 1.
        """

    def calibrate(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> None:  # noqa: B027
        """Measure the heads' quality as far as serving uses it. Called after the training for each held-out
        text, before `save`.

        Arguments as for `draft`. From `places[0] + 1` on, the texts are the target's own answers.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json and the tensors in the published format, in the target's dtype."""


def write_head(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    found = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(folder / "model.safetensors", found, {"format": "pt"})
    write_json(folder / "config.json", config)


class HeadLearner:
    """The `training.loop.Learner` of a head: AdamW, fed with the target's recorded hidden states."""

    def __init__(
        self,
        head: TrainableHead,
        target: Target,
        recording: Recording,
        windows: Windows,
        learning_rate: float,
    ) -> None:
        self._head = head
        self._device = target.device
        self._tokens, self._hidden = recording.tokens, recording.hidden
        self._windows = windows
        self.module: nn.Module = head.module
        self.batch_tokens = windows.batch_tokens
        parameters = [p for p in head.module.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.optimizers = {"adamw": adamw}

    def backward(self, step: int) -> float:
        places = self._windows[step]
        token_ids = self._tokens[places].long().to(self._device)
        loss = self._head.loss(token_ids, self._hidden[places].to(self._device))
        loss.backward()
        return loss.item()

    def updated(self) -> None:
        """Do nothing: the optimizer changes the head's parameters directly."""


@torch.no_grad()
def acceptance(head: TrainableHead, held_out: Iterable[Recorded]) -> list[float]:
    """Return, for each position of a greedy chain, the share of chains accepted through it. The same texts
    calibrate the head. Raises `ConfigError` if all answers are too short.
    """
    agreed: list[Tensor] = []
    for text in held_out:
        device = next(head.module.parameters()).device
        token_ids, hidden = text.token_ids.unsqueeze(0).to(device), text.hidden.unsqueeze(0).to(device)
        first, end = text.prompt_length - 1, len(text.token_ids) - 1 - head.depth
        if end <= first:
            continue
        places = torch.arange(first, end, device=device)
        ahead = places.unsqueeze(1) + 2 + torch.arange(head.depth, device=device)
        drafted = head.draft(token_ids, hidden, places)[0]
        agreed.append((drafted == token_ids[0, ahead]).cumprod(dim=-1))
        head.calibrate(token_ids, hidden, places)
    if not agreed:
        raise ConfigError(f"--held-out: no answer has the {head.depth + 2} tokens to measure drafts on")
    return torch.cat(agreed).float().mean(dim=0).tolist()
