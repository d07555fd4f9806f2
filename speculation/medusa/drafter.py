"""Drafting with Medusa heads: one small product for all tokens of all requests, no forward of its own."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from engine.kv_pool import KVPool, KVShape
from engine.loader import LoadedModel
from engine.sampler import Sampler
from engine.sampler.ops import argmax_rows
from engine.sampler.rows import SamplingRow, is_argmax
from engine.sequence import Sequence
from engine.speculator import Draft
from protocol.speculation import SpeculativeConfig
from speculation.drafter import Computed
from speculation.medusa.heads import MedusaHeads
from speculation.medusa.tree import StaticTree, assumed_acceptance, choose_tree
from speculation.medusa.weights import read_heads
from speculation.ranking import rank


class MedusaDrafter:
    """Head i proposes the i-th token after the sequence's last one, which has not been run yet: what the
    heads read is the target's final hidden state of the token before.

    A draft is the chain of the heads' best tokens, or with `tree` the nodes of a static tree. The heads do
    not see each other's tokens. Under coupled verification what they propose is chosen with the noise that
    the target will draw with, otherwise without any: a draft is then no matter of chance.
    """

    segment: KVShape | None = None

    def __init__(self, options: SpeculativeConfig, target: LoadedModel) -> None:
        assert options.model is not None
        hidden_size = target.model.config.get_text_config(decoder=True).hidden_size
        weights = read_heads(options.model, hidden_size, target.vocab_size)
        self.hidden_layers: tuple[int, ...] = (target.kv_shape.num_layers,)
        self._heads = MedusaHeads(weights, target)
        self._coupled = options.verification == "coupled"
        self._tree: StaticTree | None = None
        if options.tree:
            acceptance = weights.rank_acceptance or assumed_acceptance(weights.num_heads)
            self._tree = choose_tree(acceptance, options.tree_nodes)
        self._features: dict[str, tuple[int, Tensor]] = {}
        """By request: the newest hidden state [hidden_size], and its token's place."""

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._sampler = Sampler(loaded.vocab_size, loaded.device, loaded.eos_token_ids)

    def warm_up(self) -> None:
        pass

    def begin(self, sequence: Sequence, num_drafted: int, feature: Tensor | None) -> None:
        """Without a feature nothing is drafted until the sequence's next step is over."""
        self._features.pop(sequence.request_id, None)
        if feature is not None:
            self._features[sequence.request_id] = sequence.num_computed - 1, feature

    def num_drafted(self, request_id: str) -> int:
        return 0

    def feature(self, request_id: str) -> Tensor | None:
        known = self._features.get(request_id)
        return None if known is None else known[1]

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(sequences)
        known = [i for i, sequence in enumerate(sequences) if counts[i] > 0 and self._is_fresh(sequence)]
        if known:
            depth = self._depth(max(counts[i] for i in known))
            candidates = self._candidates([sequences[i] for i in known], depth)
            for i, ranked in zip(known, candidates, strict=True):
                drafts[i] = self._draft(ranked, counts[i])
        return drafts

    def _is_fresh(self, sequence: Sequence) -> bool:
        """Whether the hidden state of the last token but one is there."""
        known = self._features.get(sequence.request_id)
        return known is not None and known[0] == len(sequence.token_ids) - 2

    def _depth(self, room: int) -> int:
        """Heads that a draft of at most `room` tokens reads."""
        if self._tree is None:
            return min(room, self._heads.num_heads)
        return max(self._tree.depths[:room]) + 1

    @torch.inference_mode()
    def _candidates(self, sequences: list[Sequence], depth: int) -> list[list[list[int]]]:
        """For each sequence and head the head's tokens, best first: as many as may be drafted."""
        features = torch.stack([self._features[sequence.request_id][1] for sequence in sequences])
        logits = self._heads.logits(features, depth).flatten(0, 1)
        if self._tree is not None:
            tokens = self._ranked(logits, sequences, depth, self._tree.num_ranks)
        elif not self._coupled or all(is_argmax(sequence.params) for sequence in sequences):
            tokens = argmax_rows(logits.float()).unsqueeze(1)
        else:
            rows = [self._row(sequence, head) for sequence in sequences for head in range(depth)]
            tokens = torch.tensor(self._sampler.sample(logits, rows).token_ids).unsqueeze(1)
        return tokens.unflatten(0, (len(sequences), depth)).tolist()

    def _row(self, sequence: Sequence, head: int) -> SamplingRow:
        """For the token after so many drafted ones; those are not known yet."""
        row = sequence.sampling_row()
        row.position += head
        return row

    def _ranked(self, logits: Tensor, sequences: list[Sequence], depth: int, count: int) -> Tensor:
        params = [sequence.params for sequence in sequences for _ in range(depth)]
        positions = [sequence.position + head for sequence in sequences for head in range(depth)]
        scores, token_ids = rank(logits, params, positions, with_noise=self._coupled)
        return token_ids.gather(1, scores.topk(count).indices)

    def _draft(self, ranked: list[list[int]], room: int) -> Draft:
        if self._tree is None:
            return Draft([tokens[0] for tokens in ranked[:room]])
        tree = self._tree
        nodes = zip(tree.depths[:room], tree.ranks[:room], strict=True)
        return Draft([ranked[depth][rank] for depth, rank in nodes], tree.parents[:room])

    def observe(self, computed: Many[Computed]) -> None:
        for each in computed:
            assert each.hidden is not None
            # A copy: the row would keep the hidden states of the whole step alive.
            newest = each.start + each.num_tokens - 1, each.hidden[-1].clone()
            self._features[each.sequence.request_id] = newest

    def forget(self, request_id: str) -> None:
        self._features.pop(request_id, None)
        self._sampler.forget(request_id)
