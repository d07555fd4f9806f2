"""Drafting with Medusa heads, as chains or static trees: one small product for all tokens of all requests.
Published checkpoints have two layouts. Medusa's own: `{head}.{layer}.linear.weight|bias` and
`{head}.{num_layers}.weight`, in a file of heads alone (v1) or, with `medusa_head.` before the names, next to
the base model's tensors (Medusa-2). vLLM's: `blocks.{head}.layers.{layer}.weight|bias` and
`lm_heads.{head}.weight`, or one LM head for all (`original_lm_head`), and perhaps a `token_map`. Numbers of
heads and layers come from the tensors: published config.json files have been wrong about them.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.copies import Downloader, upload_to
from engine.devices.loaded_model import LoadedModel
from engine.linear.packed import kernel_fault, linear_of, pack_linears
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft, LateTokens
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.checkpoint import Checkpoint, round_draft
from speculation.drawing import Drawing, best_of, rank
from speculation.target_states import LastStateDrafter


class MedusaDrafter(LastStateDrafter):
    """A drafter with Medusa heads. Head i proposes the i-th token after the sequence's last one, which has
    not been run yet: the heads read the target's final hidden state of the token before.

    A draft is the chain of the heads' best tokens, or with `tree` the nodes of a static tree. The heads do
    not see each other's tokens. Under coupled verification they choose with the noise that the target will
    draw with.
    """

    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        super().__init__()
        assert options.model is not None
        hidden_size = target.model.config.get_text_config(decoder=True).hidden_size
        weights = read_heads(options.model, hidden_size, target.vocab_size)
        self.hidden_layers = (len(target.kv_group.layers),)
        format = None if options.quantization is None else CodeFormat(options.quantization)
        self._heads = MedusaHeads(weights, target, format)
        self._sampler = Sampler(target.vocab_size, target.device, target.eos_token_ids)
        self._drawing = Drawing(self._sampler, options.verification)
        self._upload, self._download = upload_to(target.device), Downloader(target.device)
        self._shares_noise = options.verification == "coupled"
        self._tree: StaticTree | None = None
        if options.tree:
            acceptance = weights.rank_acceptance or assumed_acceptance(weights.num_heads)
            self._tree = choose_tree(acceptance, options.tree_nodes)

    def _draft(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        if self._tree is None:
            return self._chains(sequences, rooms)
        return self._trees(self._tree, sequences, rooms)

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[SequenceState], depth: int) -> Tensor:
        """Return the first `depth` heads' logits, [sequences, depth, vocab_size]."""
        return self._heads.logits(self._last_states(sequences), depth)

    def _chains(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        logits = self._logits(sequences, min(max(rooms), self._heads.num_heads))
        return self._drawing.draft_at_once(sequences, rooms, logits)

    def _trees(
        self, tree: StaticTree, sequences: Sequence[SequenceState], rooms: Sequence[int]
    ) -> list[Draft]:
        depth = max(tree.depths[: max(rooms)]) + 1
        logits = self._logits(sequences, depth).flatten(0, 1)
        params = [sequence.params for sequence in sequences for _ in range(depth)]
        positions = [sequence.position + head for sequence in sequences for head in range(depth)]
        ranked = rank(logits, params, positions, self._upload, with_noise=self._shares_noise)
        best_first = best_of(*ranked, tree.num_ranks)[1].flatten()
        late = LateTokens(best_first, self._download)
        names = np.invert(np.arange(len(best_first))).reshape(len(sequences), depth, -1).tolist()
        return [tree.draft(its, room, late) for its, room in zip(names, rooms, strict=True)]


class MedusaHeads(nn.Module):
    """The heads' weights, joined: the first layer of all heads is one product, since they read the same
    input; each further layer is a batched product; a shared LM head is one product again. If rounded, each
    further layer is a product per head.
    """

    def __init__(self, weights: HeadWeights, target: LoadedModel, format: CodeFormat | None = None) -> None:
        """Round weights to the `format`, if any. Raise ConfigError if it does not fit them."""
        super().__init__()
        self.num_heads = weights.num_heads
        self._vocab_size = target.vocab_size
        own = {"device": target.device, "dtype": target.dtype}
        self._biases = [None if bias is None else bias.to(**own).unsqueeze(1) for _, bias in weights.layers]
        each_for_its_own = _Stacked if format is None else _Each
        first, later = weights.layers[:1], weights.layers[1:]
        self._layers = nn.ModuleList([_FromOne(weight.to(**own)) for weight, _ in first])
        self._layers.extend(each_for_its_own(weight.to(**own)) for weight, _ in later)
        lm_heads = weights.lm_heads.to(**own)
        self._lm_head = linear_of(lm_heads[0]) if len(lm_heads) == 1 else each_for_its_own(lm_heads)
        if format is not None:
            round_draft(self, format, target)
        if kernel_fault(target.device, target.dtype) is None:
            pack_linears(self)
        self._scale = weights.logit_scale
        self._token_map = None if weights.token_map is None else weights.token_map.to(target.device)

    def logits(self, features: Tensor, count: int) -> Tensor:
        """Return the first `count` heads' logits [batch, count, vocab_size].

        `features` are hidden states [batch, hidden_size]. Tokens outside the heads' vocabulary have -inf.
        """
        states = features.expand(count, *features.shape)
        for layer, bias in zip(self._layers, self._biases, strict=True):
            product = layer(states)
            states = states + F.silu(product if bias is None else product + bias[:count])
        logits = self._lm_head(states).transpose(0, 1) * self._scale
        if self._token_map is None:
            return logits[..., : self._vocab_size]
        everything = logits.new_full((*logits.shape[:2], self._vocab_size), -torch.inf)
        return everything.index_copy_(2, self._token_map, logits)


class _FromOne(nn.Module):
    """A layer of every head, for states [heads, batch, hidden_size] that are the same for all heads."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._all = linear_of(weights.flatten(0, 1))
        self._num_heads = len(weights)

    def forward(self, states: Tensor) -> Tensor:
        return self._all(states[0]).unflatten(1, (self._num_heads, -1)).transpose(0, 1)[: len(states)]


class _Stacked(nn.Module):
    """A layer of every head, each for its own states."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._weights = weights.transpose(1, 2)

    def forward(self, states: Tensor) -> Tensor:
        return torch.bmm(states, self._weights[: len(states)])


class _Each(nn.Module):
    """A layer of every head as one product per head, which can be quantized."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self._heads = nn.ModuleList(map(linear_of, weights))

    def forward(self, states: Tensor) -> Tensor:
        return torch.stack([head(own) for head, own in zip(self._heads, states, strict=False)])


_ASSUMED_FIRST = (0.60, 0.45, 0.35, 0.30, 0.25)
"""How often each head's best token is right, if it was not measured: near what Cai et al. 2024 plot for
Vicuna's heads. Further heads are assumed to be as good as the last of these.
"""
_ASSUMED_RANKS = 10
_RARE = 1e-4
"""The least probability: a rank that was never right still may be."""


@dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape. Node i is the `ranks[i]`-th best token of head `depths[i]`, after node
    `parents[i]` or, if that is -1, after the sequence's last token. Nodes descend in their probability of
    acceptance, so the first n are the best tree of n nodes.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    def draft(self, ranked: Sequence[Sequence[int]], room: int, late: LateTokens | None = None) -> Draft:
        """Return the first `room` nodes. `ranked[i]`: head i's tokens (or late tokens' names), best first."""
        nodes = zip(self.depths[:room], self.ranks[:room], strict=True)
        return Draft([ranked[depth][rank] for depth, rank in nodes], self.parents[:room], late=late)


def choose_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Return the `num_nodes` nodes likeliest to be accepted; fewer if the heads have no more.

    `acceptance[i][r]` is the probability that the r-th best token of head i is right, assumed to be
    independent of the other heads' (Cai et al. 2024, section 2.3.3): a node is accepted with the product of
    the probabilities on its path. A child's product is below its parent's and its better sibling's, so the
    best nodes are found one by one.
    """
    tree = StaticTree([], [], [])
    best_first: list[tuple[float, float, int, int, int]] = []

    def offer(before: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(acceptance) and rank < len(acceptance[depth]):
            path = before * max(acceptance[depth][rank], _RARE)
            heapq.heappush(best_first, (-path, before, parent, depth, rank))

    offer(1.0, -1, 0, 0)
    while best_first and len(tree.parents) < num_nodes:
        negative, before, parent, depth, rank = heapq.heappop(best_first)
        offer(-negative, len(tree.parents), depth + 1, 0)
        offer(before, parent, depth, rank + 1)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.ranks.append(rank)
    return tree


def assumed_acceptance(num_heads: int) -> list[list[float]]:
    """Return [heads][ranks], in which each further rank is right in a third of the remaining cases."""
    table = []
    for head in range(num_heads):
        first = _ASSUMED_FIRST[min(head, len(_ASSUMED_FIRST) - 1)]
        table.append([first, *((1 - first) / 3 * (2 / 3) ** rank for rank in range(_ASSUMED_RANKS - 1))])
    return table


FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_PREFIXES = ("medusa_head.", "medusa_heads.")
_OWN_NAMES = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<kind>weight|bias)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


@dataclass(frozen=True)
class HeadWeights:
    """The weights of all heads. `layers[j]` has their j-th residual layers' weights [heads, hidden_size,
    hidden_size] and biases [heads, hidden_size] (None without biases).

    `lm_heads` is [heads, rows, hidden_size], or [1, rows, hidden_size] if the heads share one. `token_map`,
    int64 [rows], has each row's token; None if that is the row's number. Logits are scaled by `logit_scale`.
    `rank_acceptance[i][r]` is the measured share of cases in which the r-th best token of head i was right;
    None if not measured.
    """

    num_heads: int
    layers: list[tuple[Tensor, Tensor | None]]
    lm_heads: Tensor
    token_map: Tensor | None
    logit_scale: float
    rank_acceptance: list[list[float]] | None


def read_heads(model: str, hidden_size: int, vocab_size: int) -> HeadWeights:
    """Read the heads. Raise `ConfigError` that names the file and what does not fit the target."""
    return _Reader(Checkpoint(model, FILES), hidden_size, vocab_size).read()


class _Reader:
    def __init__(self, checkpoint: Checkpoint, hidden_size: int, vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size
        self._blocks: dict[tuple[int, int, str], str] = {}
        """The tensors' names by head, layer and "weight" or "bias"."""
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
        """Copy repeated blocks: Medusa v1 repeats one block object in a head, and files may have it once."""
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
        rates = self._checkpoint.config.get("rank_acceptance")
        if rates is None:
            return None
        try:
            table = torch.tensor(rates, dtype=torch.float64)
        except (TypeError, ValueError):
            table = torch.empty(0)
        if table.ndim != 2 or len(table) != num_heads or not ((table >= 0) & (table <= 1)).all():
            raise self._checkpoint.error(
                "rank_acceptance", f"must have equally long lists of probabilities, {num_heads} of them"
            )
        return table.tolist()
