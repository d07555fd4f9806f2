"""Training of heads that draft one token after another, with a training-time test (Li et al. 2025, 3.2).

In serving such a head reads its own hidden states, so training does too: the drafting of `depth` tokens is
unrolled, with the text's tokens. The first token is drafted from every place of a window. Each later step
uses every second place of the step before: later tokens are drafted less often in serving, but cost as much.
The head learns the target's distribution over the tokens that it can draft.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from engine.devices.torch.program import TorchProgram
from engine.model.program import ModelProgram
from training.heads.contract import Target, TrainableHead

DEFAULT_DEPTH = 4
_STEP_WEIGHT = 0.8
"""The weight of a drafting step's loss relative to the step before it."""
_STRIDE = 2
"""The stride: each drafting step starts from every second place of the step before it."""

Describe = Callable[[nn.Module, nn.Module], ModelProgram]
"""A function that describes a head with this embedding and this LM head."""


class UnrolledTraining(TrainableHead):
    """A head in training. Place p of a window stands for the drafting that starts when token p + 1 and the
    hidden states up to token p are known.
    """

    def __init__(
        self,
        target: Target,
        head: nn.Module,
        captured: tuple[int, ...],
        depth: int,
        draft_vocab_size: int,
        own_lm_head: bool,
    ) -> None:
        """Use the hidden states of `captured` layers as the feature; of the last layer if there are none.
        Without its own LM head, the head uses the target's rows of the `draft_vocab_size` tokens.
        """
        self.depth = depth
        self.hidden_layers: tuple[int, ...] = (*captured, target.num_layers)
        self.draft_ids = target.frequent_tokens(draft_vocab_size)
        self._target = target
        self._feature_size = (len(captured) or 1) * target.hidden_size
        self._rows = target.lm_head(self.draft_ids)
        self._lm_head = nn.Linear(*reversed(self._rows.shape), bias=False, device="meta")
        rows = self._rows.clone() if own_lm_head else self._rows
        self._lm_head.weight = nn.Parameter(rows, requires_grad=own_lm_head)
        self._owns_lm_head = own_lm_head
        learned = {"head": head, "lm_head": self._lm_head} if own_lm_head else {"head": head}
        self.module: nn.Module = nn.ModuleDict(learned)

    def run_by(self, describe: Describe, combine: Callable[[Tensor], Tensor], positions: int) -> None:
        """Unroll what `describe` returns for `positions` tokens; `combine` makes a row's input of states."""
        embedding = self._target.model.get_input_embeddings()
        if embedding.weight.dtype is not self._target.computes_in:
            embedding = copy.deepcopy(embedding).to(self._target.computes_in)
        self._attention = _UnrolledAttention()
        described = describe(embedding, self._lm_head)
        assert described.entry is not None
        self._feeds_normed = described.entry.feeds_normed
        self._program = TorchProgram(described, positions, attend=self._attention)
        self._combine = combine

    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the cross-entropy with the target's distribution over the draft vocabulary, in nats.

        A drafting step learns only at places where the text's tokens before it are the target's own argmax,
        since a draft is verified only there.
        """
        count = token_ids.shape[1] - 1
        with torch.no_grad():
            teacher = self._target.logits(hidden[..., -self._target.hidden_size :], self._rows)
            agrees = self.draft_ids[teacher[:, :-1].argmax(dim=-1)] == token_ids[:, 1:]
            teacher = teacher.softmax(dim=-1)
        later = pad(token_ids, (0, self.depth))
        reached = torch.ones_like(agrees)
        total = torch.zeros((), device=token_ids.device)
        steps = self._unroll(
            hidden[..., : self._feature_size], lambda places, step, _: later[:, places + 1 + step], _STRIDE
        )
        for step, (places, scored) in enumerate(steps):
            if step:
                reached = reached[:, :-1] & agrees[:, step:]
            places = places[places < count - step]
            learns = reached[:, places]
            wanted = teacher[:, places + 1 + step][learns]
            if not len(wanted):
                break
            logits = self._logits(scored[:, : len(places)][learns]).float()
            total = total + _STEP_WEIGHT**step * cross_entropy(logits, wanted)
        return total / sum(_STEP_WEIGHT**step for step in range(self.depth))

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """Return greedy chains from `places`: int64 [windows, places, depth]."""

        def choose(places: Tensor, step: int, scored: Tensor | None) -> Tensor:
            return token_ids[:, 1:] if scored is None else self._best(scored)

        steps = self._unroll(hidden[..., : self._feature_size], choose, stride=1)
        return torch.stack([self._best(scored[:, places]) for _, scored in steps], dim=-1)

    def _best(self, scored: Tensor) -> Tensor:
        return self.draft_ids[self._logits(scored).argmax(dim=-1)]

    def _logits(self, scored: Tensor) -> Tensor:
        with self._autocast():
            return self._lm_head(scored)

    def _unroll(
        self, features: Tensor, choose: Callable[[Tensor, int, Tensor | None], Tensor], stride: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each drafting step's places and the LM head's input there, [windows, places, hidden_size].
        The first step has all places of a window except the last, each later step every `stride`th of these.

        `choose` returns a step's tokens; it may use the LM head's input of the step before.
        """
        places = torch.arange(features.shape[1] - 1, device=features.device)
        self._attention.begin(places, stride)
        scored: Tensor | None = None
        with self._autocast():
            hidden = self._combine(features[:, :-1].to(self._target.computes_in))
        for step in range(self.depth):
            if step:
                places, hidden = places[::stride], hidden[:, ::stride]
            token_ids = choose(places, step, scored)
            with self._autocast():
                scored, output, _ = self._program.states(token_ids, places + 1 + step, None, hidden)
            hidden = scored if self._feeds_normed else output
            yield places, scored

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._target.computes_in is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._target.device.type, self._target.dtype)

    def head_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the head's learned tensors, except for its LM head, in the target's dtype."""
        state = self.module.get_submodule("head").state_dict()
        return [(name, value.detach().to(self._target.dtype)) for name, value in state.items()]


class _UnrolledAttention:
    """Attention of the unrolled drafting. Each call is one drafting step. A row sees the first step's rows of
    all places up to its own, and the later steps' rows of its own place.
    """

    def begin(self, places: Tensor, stride: int) -> None:
        """Begin a window whose first step drafts from `places`."""
        self._places, self._stride = places, stride
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        """Attend with query [windows, places, num_heads, head_dim]; return its shape."""
        groups = query.shape[-2] // key.shape[-2]
        query = query.transpose(1, 2)
        key, value = (rows.repeat_interleave(groups, dim=-2).transpose(1, 2) for rows in (key, value))
        if not self._keys:
            self._keys, self._values = [key], [value]
            return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        own = [rows[:, :, :: self._stride] for rows in self._keys[1:]] + [key]
        values = [rows[:, :, :: self._stride] for rows in self._values[1:]] + [value]
        self._keys[1:], self._values[1:] = own, values
        query = query * query.shape[-1] ** -0.5
        places = self._places[:: self._stride ** len(own)]
        scores = query @ self._keys[0].transpose(2, 3)
        scores = [scores.masked_fill(places.unsqueeze(1) < self._places, -torch.inf)]
        scores += [(query * each).sum(dim=-1, keepdim=True) for each in own]
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(value.dtype)
        attended = weights[..., : -len(own)] @ self._values[0]
        for each, weight in zip(values, weights[..., -len(own) :].split(1, dim=-1), strict=True):
            attended = attended + weight * each
        return attended.transpose(1, 2)
