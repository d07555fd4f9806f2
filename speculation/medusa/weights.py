"""Reads Medusa heads from the published layouts.

Medusa's own: `{head}.{layer}.linear.weight|bias` and `{head}.{num_layers}.weight`, in a file of heads alone
(v1) or, with `medusa_head.` before the names, beside the base model's tensors (Medusa-2). vLLM's:
`blocks.{head}.layers.{layer}.weight|bias` and `lm_heads.{head}.weight`, or one LM head for all
(`original_lm_head`), and perhaps a `token_map`. Numbers of heads and layers come from the tensors: published
config.json files have been wrong about them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from speculation.checkpoint import Checkpoint

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_PREFIXES = ("medusa_head.", "medusa_heads.")
_OWN_NAMES = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<kind>weight|bias)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


@dataclass(frozen=True)
class HeadWeights:
    """`layers[j]` are the weights [heads, hidden_size, hidden_size] and biases [heads, hidden_size] (None
    where there are none) of all heads' j-th residual layers.

    `lm_heads` is [heads, rows, hidden_size], or [1, rows, hidden_size] if the heads share one. `token_map`
    [rows], int64, has the token of each of its rows; None if that is the row's number. Logits are scaled by
    `logit_scale`. `rank_acceptance[i][r]` is how often the r-th best token of head i was the right one when
    that was measured; None if it never was.
    """

    num_heads: int
    layers: list[tuple[Tensor, Tensor | None]]
    lm_heads: Tensor
    token_map: Tensor | None
    logit_scale: float
    rank_acceptance: list[list[float]] | None


def read_heads(model: str, hidden_size: int, vocab_size: int) -> HeadWeights:
    """Raises `ConfigError` that names the file, and the tensor or field, that does not fit the target."""
    return _Reader(Checkpoint(model, FILES), hidden_size, vocab_size).read()


class _Reader:
    def __init__(self, checkpoint: Checkpoint, hidden_size: int, vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size
        self._blocks: dict[tuple[int, int, str], str] = {}
        """By head, layer and "weight" or "bias": the tensor's name."""
        self._lm_heads: dict[int, str] = {}
        self._token_map: str | None = None
        self._shared = bool(checkpoint.config.get("original_lm_head"))

    def read(self) -> HeadWeights:
        self._sort_names()
        num_heads, num_layers = self._count()
        token_map = self._read_token_map()
        config = self._checkpoint.config
        return HeadWeights(
            num_heads=num_heads,
            layers=[self._layer(layer, num_heads) for layer in range(num_layers)],
            lm_heads=self._read_lm_heads(num_heads, token_map),
            token_map=token_map,
            logit_scale=float(config.get("logit_scale", 1.0)),
            rank_acceptance=self._read_rank_acceptance(num_heads),
        )

    def _sort_names(self) -> None:
        names = {name: name for name in self._checkpoint.names}
        for prefix in _PREFIXES:
            beside_a_model = {n.removeprefix(prefix): n for n in names if n.startswith(prefix)}
            names = beside_a_model or names
        depths: dict[int, int] = {}
        for short, name in names.items():
            if match := _VLLM_BLOCK.fullmatch(short):
                self._blocks[int(match[1]), int(match[2]), match[3]] = name
            elif match := _VLLM_LM_HEAD.fullmatch(short):
                self._lm_heads[int(match[1])] = name
            elif short == "lm_head.weight":
                self._shared, self._lm_heads[0] = True, name
            elif short == "token_map":
                self._token_map = name
            elif match := _OWN_NAMES.fullmatch(short):
                head, layer = int(match["head"]), int(match["layer"])
                if match["linear"]:
                    self._blocks[head, layer, match["kind"]] = name
                else:
                    self._lm_heads[head] = name
                    depths[head] = layer
        self._share_blocks(depths)

    def _share_blocks(self, depths: dict[int, int]) -> None:
        """Medusa v1 repeats one block object in a head, so that a file may have it once, for all layers."""
        for head, depth in depths.items():
            for layer in range(1, depth):
                for kind in ("weight", "bias"):
                    before = self._blocks.get((head, layer - 1, kind))
                    if before is not None:
                        self._blocks.setdefault((head, layer, kind), before)

    def _count(self) -> tuple[int, int]:
        heads = {head for head, _, _ in self._blocks} | (set() if self._shared else set(self._lm_heads))
        if not heads:
            raise self._checkpoint.error("the tensors", "have no Medusa head among them")
        return max(heads) + 1, max((layer + 1 for _, layer, _ in self._blocks), default=0)

    def _layer(self, layer: int, num_heads: int) -> tuple[Tensor, Tensor | None]:
        size = self._hidden_size
        weights = [self._block(head, layer, "weight", (size, size)) for head in range(num_heads)]
        if not any((head, layer, "bias") in self._blocks for head in range(num_heads)):
            return torch.stack(weights), None
        biases = [self._block(head, layer, "bias", (size,)) for head in range(num_heads)]
        return torch.stack(weights), torch.stack(biases)

    def _block(self, head: int, layer: int, kind: str, shape: tuple[int, ...]) -> Tensor:
        name = self._blocks.get((head, layer, kind))
        if name is None:
            raise self._checkpoint.error(f"head {head}", f"has no {kind} for its layer {layer}")
        return self._checked(name, shape)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if tensor.shape != shape:
            found = tuple(tensor.shape)
            raise self._checkpoint.error(name, f"has the shape {found}, the target needs {shape}")
        return tensor

    def _read_token_map(self) -> Tensor | None:
        if self._token_map is None:
            rows = self._checkpoint.config.get("truncated_vocab_size", self._vocab_size)
            if rows is not None and rows < self._vocab_size:
                raise self._checkpoint.error("truncated_vocab_size", f"is {rows}, but there is no token_map")
            return None
        token_map = self._checkpoint.tensor(self._token_map).long()
        if token_map.ndim != 1 or not ((token_map >= 0) & (token_map < self._vocab_size)).all():
            raise self._checkpoint.error(
                self._token_map,
                f"must be a list of token ids below {self._vocab_size}, the target's vocabulary",
            )
        return token_map

    def _read_lm_heads(self, num_heads: int, token_map: Tensor | None) -> Tensor:
        count = 1 if self._shared else num_heads
        return torch.stack([self._lm_head(head, token_map) for head in range(count)])

    def _lm_head(self, head: int, token_map: Tensor | None) -> Tensor:
        """Return an LM head with a row for each token that can be drafted; further rows are padding."""
        if head not in self._lm_heads:
            raise self._checkpoint.error(f"head {head}", "has no LM head")
        name = self._lm_heads[head]
        weight = self._checkpoint.tensor(name)
        if weight.ndim != 2 or weight.shape[1] != self._hidden_size:
            found = tuple(weight.shape)
            raise self._checkpoint.error(name, f"has the shape {found}, not (rows, {self._hidden_size})")
        chosen = token_map is not None and len(weight) <= len(token_map)
        rows = len(token_map) if token_map is not None and chosen else self._vocab_size
        if len(weight) < rows:
            raise self._checkpoint.error(name, f"has {len(weight)} rows for a vocabulary of {rows} tokens")
        return weight[:rows] if token_map is None or chosen else weight[token_map]

    def _read_rank_acceptance(self, num_heads: int) -> list[list[float]] | None:
        given = self._checkpoint.config.get("rank_acceptance")
        if given is None:
            return None
        try:
            table = torch.tensor(given, dtype=torch.float64)
        except (TypeError, ValueError):
            table = torch.empty(0)
        if table.ndim != 2 or len(table) != num_heads or not ((table >= 0) & (table <= 1)).all():
            raise self._checkpoint.error(
                "rank_acceptance", f"must have equally long lists of probabilities, {num_heads} of them"
            )
        return table.tolist()
