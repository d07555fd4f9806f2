"""Medusa heads in training: residual layers on the target's final hidden state, and one shared LM head."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.heads.contract import HeadOptions, Target, TrainableHead, write_head

DEFAULT_DEPTH = 4
NUM_RANKS = 10


def build_medusa(target: Target, options: HeadOptions) -> MedusaTraining:
    """Build the heads. Raises `ConfigError` that names the option."""
    size = options.draft_vocab_size or target.vocab_size
    return MedusaTraining(target, options.depth or DEFAULT_DEPTH, options.num_layers or 1, size)


class MedusaTraining(TrainableHead):
    """Medusa heads in training. Each head has its own residual layers; all share an LM head that starts as
    the rows of the target's for the `draft_vocab_size` most frequent tokens. A head learns the target's
    distribution of its token (self-distillation, Cai et al. 2024, section 2.3.2) at places where the tokens
    in between are the target's own argmax. A head does not see them, and its tokens are verified only there.
    """

    def __init__(self, target: Target, depth: int, num_layers: int, draft_vocab_size: int) -> None:
        self.depth = depth
        self.hidden_layers: tuple[int, ...] = (target.num_layers,)
        self._target = target
        self._num_layers = num_layers
        self._token_map = target.frequent_tokens(draft_vocab_size)
        self._rows = target.lm_head(self._token_map)
        self._heads = ResidualHeads(depth, num_layers, self._rows)
        self.module: nn.Module = self._heads
        self._right: list[Tensor] = []
        """Whether each head's token of each rank was right on held-out text: [places, heads, ranks]."""

    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self._target.computes_in)
        with torch.no_grad():
            teacher = self._target.logits(hidden, self._rows)
            agrees = self._token_map[teacher[:, :-1].argmax(dim=-1)] == token_ids[:, 1:]
            teacher = teacher.softmax(dim=-1)
        total = torch.zeros((), device=hidden.device)
        reached = torch.ones_like(agrees[:, :1]).expand(*agrees.shape[:1], agrees.shape[1] + 1)
        for head in range(self.depth):
            reached = reached[:, :-1] & agrees[:, head:]
            student = self._heads(head, hidden[:, : reached.shape[1]][reached])
            wanted = teacher[:, 1 + head :][reached]
            total = total + F.cross_entropy(student.float(), wanted, reduction="sum") / max(1, len(wanted))
        return total / self.depth

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        return self._ranked(hidden[:, places].to(self._target.computes_in), 1)[..., 0]

    def _ranked(self, hidden: Tensor, count: int) -> Tensor:
        """Return the best tokens of each head: [windows, places, heads, count]."""
        best = [self._heads(head, hidden).topk(count).indices for head in range(self.depth)]
        return self._token_map[torch.stack(best, dim=2)]

    def calibrate(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> None:
        """Record which ranks of each head are right. A static tree is chosen from that."""
        hidden = hidden[:, places].to(self._target.computes_in)
        ranked = self._ranked(hidden, min(NUM_RANKS, len(self._token_map)))
        ahead = places.unsqueeze(1) + 2 + torch.arange(self.depth, device=places.device)
        self._right.append((ranked == token_ids[:, ahead].unsqueeze(-1)).flatten(0, 1))

    def save(self, folder: Path) -> None:
        """Save in vLLM's layout for one LM head. `rank_acceptance` is our addition."""
        tensors = {
            name: parameter.detach().to(self._target.dtype)
            for name, parameter in self.module.named_parameters()
        }
        config: dict[str, object] = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
            "truncated_vocab_size": len(self._token_map),
            "num_heads": self.depth,
            "num_hidden_layers": self._num_layers,
            "medusa_fc_bias": False,
            "original_lm_head": True,
        }
        if len(self._token_map) < self._target.vocab_size:
            tensors["token_map"] = self._token_map
        if self._right:
            shares = torch.cat(self._right).float().mean(dim=0)
            config["rank_acceptance"] = [[round(share, 4) for share in head] for head in shares.tolist()]
        write_head(folder, config, tensors)


class ResidualHeads(nn.Module):
    """Float32 weights under vLLM's names. The layers start at zero, the LM head as the target's."""

    def __init__(self, num_heads: int, num_layers: int, lm_head: Tensor) -> None:
        super().__init__()
        rows, hidden_size = lm_head.shape
        device = lm_head.device
        self.blocks = nn.ModuleList(ResidualBlock(num_layers, hidden_size, device) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList([nn.Linear(hidden_size, rows, bias=False, device=device)])
        self.lm_heads[0].weight.data.copy_(lm_head)

    def forward(self, head: int, hidden: Tensor) -> Tensor:
        """Return logits [..., rows] in the dtype of `hidden` [..., hidden_size]."""
        return F.linear(self.blocks[head](hidden), self.lm_heads[0].weight.to(hidden.dtype))


class ResidualBlock(nn.Module):
    def __init__(self, num_layers: int, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False, device=device) for _ in range(num_layers)
        )
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(F.linear(hidden, layer.weight.to(hidden.dtype)))
        return hidden
