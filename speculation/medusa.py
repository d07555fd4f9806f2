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
from itertools import product

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
from speculation.checkpoint import Checkpoint, check_shape, round_draft
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
_OWN_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.")


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
    checkpoint = Checkpoint(model, FILES)
    names, size = _names_by_vllms(checkpoint.names), hidden_size
    blocks = [(int(match[1]), int(match[2])) for match in map(_BLOCK.match, names) if match]
    heads = {head for head, _ in blocks}
    is_shared = "lm_head.weight" in names or bool(checkpoint.config.get("original_lm_head"))
    if not is_shared:
        heads |= {int(match[1]) for match in map(_LM_HEAD.match, names) if match}
    if not heads:
        raise checkpoint.error("the tensors", "have no Medusa head among them")
    num_heads = max(heads) + 1

    def of_layer(layer: int, kind: str, *shape: int) -> Tensor:
        tensors = []
        for head in range(num_heads):
            name = names.get(f"blocks.{head}.layers.{layer}.{kind}")
            if name is None:
                raise checkpoint.error(f"head {head}", f"has no {kind} for its layer {layer}")
            tensors.append(checkpoint.tensor(name))
            check_shape(checkpoint, name, tensors[-1], shape)
        return torch.stack(tensors)

    layers: list[tuple[Tensor, Tensor | None]] = []
    for layer in range(max((1 + layer for _, layer in blocks), default=0)):
        has_bias = any(f"blocks.{head}.layers.{layer}.bias" in names for head in heads)
        bias = of_layer(layer, "bias", size) if has_bias else None
        layers.append((of_layer(layer, "weight", size, size), bias))
    token_map = _token_map(checkpoint, names.get("token_map"), vocab_size)
    lm_heads = []
    for head in range(1 if is_shared else num_heads):
        name = names.get(f"lm_heads.{head}.weight") or (None if head else names.get("lm_head.weight"))
        if name is None:
            raise checkpoint.error(f"head {head}", "has no LM head")
        lm_heads.append(_lm_head(checkpoint, name, hidden_size, vocab_size, token_map))
    return HeadWeights(
        num_heads=num_heads,
        layers=layers,
        lm_heads=torch.stack(lm_heads),
        token_map=token_map,
        logit_scale=float(checkpoint.config.get("logit_scale", 1.0)),
        rank_acceptance=_rank_acceptance(checkpoint, num_heads),
    )


def _names_by_vllms(names: Sequence[str]) -> dict[str, str]:
    """Return the file's names by vLLM's. Medusa v1 repeats a block object, and files may have it once."""
    given = {name: name for name in names}
    for prefix in _PREFIXES:
        given = {name.removeprefix(prefix): name for name in given if name.startswith(prefix)} or given
    found: dict[str, str] = {}
    depths: dict[str, int] = {}
    for short, name in given.items():
        match = _OWN_NAME.fullmatch(short)
        if match is None:
            found[short] = name
        elif match[3]:
            found[f"blocks.{match[1]}.layers.{match[2]}.{match[4]}"] = name
        else:
            found[f"lm_heads.{match[1]}.weight"] = name
            depths[match[1]] = int(match[2])
    for head, depth in depths.items():
        for layer, kind in product(range(1, depth), ("weight", "bias")):
            if before := found.get(f"blocks.{head}.layers.{layer - 1}.{kind}"):
                found.setdefault(f"blocks.{head}.layers.{layer}.{kind}", before)
    return found


def _token_map(checkpoint: Checkpoint, name: str | None, vocab_size: int) -> Tensor | None:
    if name is None:
        rows = checkpoint.config.get("truncated_vocab_size", vocab_size)
        if rows is not None and rows < vocab_size:
            raise checkpoint.error("truncated_vocab_size", f"is {rows}, but there is no token_map")
        return None
    token_map = checkpoint.tensor(name).long()
    if token_map.ndim != 1 or not ((token_map >= 0) & (token_map < vocab_size)).all():
        raise checkpoint.error(
            name, f"must be a list of token ids below {vocab_size}, the target's vocabulary"
        )
    return token_map


def _lm_head(
    checkpoint: Checkpoint, name: str, hidden_size: int, vocab_size: int, token_map: Tensor | None
) -> Tensor:
    """Return an LM head with a row for each token that can be drafted; further rows are padding."""
    weight = checkpoint.tensor(name)
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise checkpoint.error(name, f"has the shape {tuple(weight.shape)}, not (rows, {hidden_size})")
    chosen = token_map is not None and len(weight) <= len(token_map)
    rows = len(token_map) if token_map is not None and chosen else vocab_size
    if len(weight) < rows:
        raise checkpoint.error(name, f"has {len(weight)} rows for a vocabulary of {rows} tokens")
    return weight[:rows] if token_map is None or chosen else weight[token_map]


def _rank_acceptance(checkpoint: Checkpoint, num_heads: int) -> list[list[float]] | None:
    rates = checkpoint.config.get("rank_acceptance")
    if rates is None:
        return None
    try:
        table = torch.tensor(rates, dtype=torch.float64)
    except (TypeError, ValueError):
        table = torch.empty(0)
    if table.ndim != 2 or len(table) != num_heads or not ((table >= 0) & (table <= 1)).all():
        raise checkpoint.error(
            "rank_acceptance", f"must have equally long lists of probabilities, {num_heads} of them"
        )
    return table.tolist()
