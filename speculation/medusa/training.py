"""Medusa heads in training: residual layers between the target's final hidden state and its own LM head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from protocol.errors import ConfigError
from speculation.training.head import HeadOptions, Target

DEFAULT_DEPTH = 4
MAX_DEPTH = 16
NUM_RANKS = 10


def build(target: Target, options: HeadOptions) -> MedusaTraining:
    """Raises `ConfigError` that names the option."""
    depth = options.depth or DEFAULT_DEPTH
    if depth > MAX_DEPTH:
        raise ConfigError(f"--depth: at most {MAX_DEPTH} Medusa heads, got {depth}")
    kept = options.draft_vocab_size
    if kept is not None and kept > target.vocab_size:
        raise ConfigError(f"--draft-vocab-size: {kept} exceeds the model's {target.vocab_size} tokens")
    return MedusaTraining(target, depth, options.num_layers or 1, kept)


class MedusaTraining:
    """Implements `speculation.training.head.TrainableHead`.

    The LM head stays the target's, so that a head has hidden_size**2 weights for each of its layers and no
    vocabulary of its own; with `draft_vocab_size` only the rows of the most frequent tokens are used. A head
    learns the target's whole distribution of its token, given the text before that (self-distillation, Cai et
    al. 2024, section 2.3.2).
    """

    def __init__(self, target: Target, depth: int, num_layers: int, draft_vocab_size: int | None) -> None:
        self.depth = depth
        self.hidden_layers: tuple[int, ...] = (target.num_layers,)
        self.module: nn.Module = ResidualHeads(depth, num_layers, target.hidden_size).to(target.device)
        self._target = target
        self._token_map: Tensor | None = None
        weight = target.model.get_output_embeddings().weight.detach()
        if draft_vocab_size is not None and draft_vocab_size < target.vocab_size:
            frequent = target.token_counts.topk(draft_vocab_size).indices
            self._token_map = frequent.sort().values.to(target.device)
            weight = weight[self._token_map]
        self._lm_head = weight[: target.vocab_size]
        self._rank_acceptance: Tensor | None = None

    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            probabilities = self._target.logits(hidden[:, 1:]).float().softmax(dim=-1)
            if self._token_map is not None:
                probabilities = probabilities[..., self._token_map]
        total = torch.zeros((), device=hidden.device)
        length = hidden.shape[1]
        for head in range(self.depth):
            student = self._logits(head, hidden[:, : length - 1 - head])
            teacher = probabilities[:, head:]
            total = total + F.cross_entropy(student.flatten(0, 1).float(), teacher.flatten(0, 1))
        return total / self.depth

    def _logits(self, head: int, hidden: Tensor) -> Tensor:
        state = self.module(head, hidden)
        return F.linear(state, self._lm_head) * self._target.logit_scale

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        return self._ranked(hidden[:, places], 1)[..., 0]

    def _ranked(self, hidden: Tensor, count: int) -> Tensor:
        """The best tokens of each head: [windows, places, heads, count]."""
        best = [self._logits(head, hidden).topk(count).indices for head in range(self.depth)]
        rows = torch.stack(best, dim=2)
        return rows if self._token_map is None else self._token_map[rows]

    def calibrate(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> None:
        """How often each rank of each head is right, which is what a static tree is chosen by."""
        ranked = self._ranked(hidden[:, places], min(NUM_RANKS, len(self._lm_head)))
        ahead = places.unsqueeze(1) + 2 + torch.arange(self.depth, device=places.device)
        right = ranked == token_ids[:, ahead].unsqueeze(-1)
        self._rank_acceptance = right.float().mean(dim=(0, 1))

    def save(self, folder: Path) -> None:
        """vLLM's layout, with `original_lm_head` and no copy of it. `rank_acceptance` is ours."""
        tensors = {
            name: parameter.detach().to("cpu", self._target.dtype).contiguous()
            for name, parameter in self.module.named_parameters()
        }
        config: dict[str, object] = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
            "truncated_vocab_size": len(self._lm_head),
            "num_heads": self.depth,
            "num_hidden_layers": len(tensors) // self.depth,
            "medusa_fc_bias": False,
            "original_lm_head": True,
            "logit_scale": self._target.logit_scale,
        }
        if self._token_map is not None:
            tensors["token_map"] = self._token_map.cpu()
        if self._rank_acceptance is not None:
            config["rank_acceptance"] = [
                [round(share, 4) for share in head] for head in self._rank_acceptance.tolist()
            ]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ResidualHeads(nn.Module):
    """Float32 weights by vLLM's names; zero at first, so that a head begins as the target's own."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(num_layers, hidden_size) for _ in range(num_heads))

    def forward(self, head: int, hidden: Tensor) -> Tensor:
        """The head's state, in the dtype of `hidden` [..., hidden_size]."""
        state: Tensor = self.blocks[head](hidden)
        return state


class ResidualBlock(nn.Module):
    def __init__(self, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False, dtype=torch.float32) for _ in range(num_layers)
        )
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(F.linear(hidden, layer.weight.to(hidden.dtype)))
        return hidden
