"""Drafting with Medusa heads: one small product for all tokens of all requests, no forward of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.copies import Downloader, upload_to
from engine.devices.loaded_model import LoadedModel
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig
from speculation.drafter import Computed, Drafter, HiddenRows
from speculation.drawing import Drawing
from speculation.medusa.heads import MedusaHeads
from speculation.medusa.tree import StaticTree, assumed_acceptance, choose_tree
from speculation.medusa.weights import read_heads
from speculation.ranking import best_of, rank


class MedusaDrafter(Drafter):
    """Head i proposes the i-th token after the sequence's last one, which has not been run yet: what the
    heads read is the target's final hidden state of the token before.

    A draft is the chain of the heads' best tokens, or with `tree` the nodes of a static tree. The heads do
    not see each other's tokens. Under coupled verification what they propose is chosen with the noise that
    the target will draw with.
    """

    def __init__(self, options: SpeculativeConfig, target: LoadedModel) -> None:
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
        self._features: dict[str, tuple[int, HiddenRows]] = {}
        """By request: the newest hidden state, and its token's place."""

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Without a feature nothing is drafted until the sequence's next step is over."""
        self._features.pop(sequence.request_id, None)
        if feature is not None:
            known = HiddenRows(feature.unsqueeze(0), range(1))
            self._features[sequence.request_id] = sequence.num_computed - 1, known

    def feature(self, request_id: str) -> Tensor | None:
        known = self._features.get(request_id)
        return None if known is None else known[1].cut()[0]

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(sequences)
        known = [i for i, sequence in enumerate(sequences) if counts[i] > 0 and self._is_fresh(sequence)]
        if known:
            ready, rooms = [sequences[i] for i in known], [counts[i] for i in known]
            made = self._chains(ready, rooms) if self._tree is None else self._trees(self._tree, ready, rooms)
            for i, draft in zip(known, made, strict=True):
                drafts[i] = draft
        return drafts

    def _is_fresh(self, sequence: SequenceState) -> bool:
        """Whether the hidden state of the last token but one is there."""
        known = self._features.get(sequence.request_id)
        return known is not None and known[0] == len(sequence.token_ids) - 2

    @torch.inference_mode()
    def _logits(self, sequences: Sequence[SequenceState], depth: int) -> Tensor:
        """Return the first `depth` heads' logits, [sequences, depth, vocab_size]."""
        features = [self._features[sequence.request_id][1].cut() for sequence in sequences]
        return self._heads.logits(torch.cat(features), depth)

    def _chains(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> list[Draft]:
        depth = min(max(rooms), self._heads.num_heads)
        tokens, distributions = self._drawing.draw_at_once(sequences, self._logits(sequences, depth))
        late, drafts = LateTokens(tokens.clamp_min(0), self._download), []
        for first, sequence, room in zip(range(0, len(tokens), depth), sequences, rooms, strict=True):
            places = range(first, first + min(room, depth))
            drawn = None
            if distributions is not None and not sequence.params.is_greedy:
                drawn = distributions[places.start : places.stop]
            drafts.append(Draft([~place for place in places], distributions=drawn, late=late))
        return drafts

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

    def observe(self, computed: Sequence[Computed]) -> None:
        for each in computed:
            assert each.hidden is not None
            place = each.start + each.num_tokens - 1
            self._features[each.sequence.request_id] = place, each.hidden.newest()

    def forget(self, request_id: str) -> None:
        self._features.pop(request_id, None)
        self._sampler.forget(request_id)
