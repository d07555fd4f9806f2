"""Drafting with EAGLE and MTP heads: the target's hidden states come in with each step, a head of one layer
drafts, or several such heads do.

A place's row is the pair of its token and the hidden state before it. Committed tokens' rows have the
target's hidden states, which `observe` brings. Only the rows of drafted tokens have the head's own. Their KV
is overwritten as soon as the target's states are there; keeping it costs a tenth of the accepted length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import Runner, Step
from engine.devices.attention import select_backend
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend, LayerKv
from engine.kv.layout import DRAFT, Group
from engine.kv.pool import KVPool
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.chains import ChainDrafting, DraftRows
from speculation.draft_kv import DraftKvDrafter, Known
from speculation.drafter import HiddenRows
from speculation.drawing import in_whole_vocabulary
from speculation.several_heads import SeveralHeads
from speculation.tree_drafting import TreeDrafting


class DraftHead(ABC):
    """A decoder layer over pairs of a token and the target's hidden state before it, or several such heads.

    It reads the target's `hidden_layers`, numbered as in Transformers' `hidden_states`, all of them together
    `feature_size` wide, and keeps its KV in `kv_group`. `draft_ids` [draft_vocab_size], int64, are the
    target's ids of the tokens that it can draft, None if it can draft all.
    """

    hidden_layers: tuple[int, ...]
    feature_size: int
    kv_group: Group
    draft_ids: Tensor | None = None
    num_heads = 1
    mixes_in_program = False
    """Whether a native runner takes features [rows, feature_size] without `combine`."""

    def combine(self, features: Tensor) -> Tensor:
        """Return what rows take [..., hidden_size] of the target's hidden states [..., feature_size]."""
        return features

    @abstractmethod
    def runner(
        self,
        config: ServeConfig,
        target: LoadedModel,
        kv: Sequence[LayerKv],
        backend: type[AttentionBackend],
    ) -> Runner:
        """Return what runs the head with these layers' KV: for several heads `SeveralHeads`. To be called
        once.
        """


class HeadDrafter(DraftKvDrafter):
    shift = 1

    def __init__(self, head: DraftHead, options: SpeculativeConfig, config: ServeConfig) -> None:
        super().__init__()
        self._options, self._config, self._head = options, config, head
        self.kv_group, self.hidden_layers = head.kv_group, head.hidden_layers
        self.further_features = head.num_heads - 1
        self._combine = head.combine

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        device, dtype = loaded.device, loaded.dtype
        backend_class, _ = select_backend(device, dtype, self._config.attention_backend)
        self._runner = self._head.runner(self._config, loaded, pool.layers(DRAFT), backend_class)
        self._sampler = Sampler(loaded.vocab_size, device, loaded.eos_token_ids)
        self._vocab_size = loaded.vocab_size
        made = self._runner, self._options, device, self._draft_rows, self._whole
        self._chains = ChainDrafting(*made, self._sampler)
        self._trees: TreeDrafting | None = None
        if self._options.tree:
            recurs = loaded.recurrent is not None
            self._trees = TreeDrafting(*made, self._config.block_size, recurs=recurs)
        feature = torch.zeros((1, self._head.feature_size), dtype=dtype, device=device)
        self._no_feature = HiddenRows(feature, range(1))
        self._nothing_carried = feature.new_zeros((self.further_features, loaded.hidden_size))

    def warm_up(self) -> None:
        self._runner.warm_up()
        if self._trees is not None:
            self._trees.warm_up(self._no_feature.cut())

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        rows, features = self._committed_rows(sequences)
        self._give_carried(sequences)
        drafts: Sequence[Draft | None]
        if self._trees is not None:
            drafts = self._trees.draft(sequences, rows, counts, self._combine(features))
        else:
            mixes = self._head.mixes_in_program and self._chains.is_native(sequences)
            hidden = features if mixes else self._combine(features)
            drafts = self._chains.draft(sequences, rows, counts, hidden)
        self._take_carried(sequences)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft is not None:
                draft.is_blind = self._known[sequence.request_id].is_blind
        return [*drafts]

    def _draft_rows(self, sequence: SequenceState, rows: DraftRows) -> SequenceRows:
        root, first_key = len(sequence.token_ids) - 1, self._known[sequence.request_id].first
        start, tables = root + rows.first, sequence.held.blocks
        return SequenceRows(rows.token_ids, start, tables, rows.masks, root, first_key)

    def _whole(self, logits: Tensor) -> Tensor:
        return in_whole_vocabulary(logits, self._head.draft_ids, self._vocab_size)

    def _committed_rows(self, sequences: Sequence[SequenceState]) -> tuple[list[SequenceRows], Tensor]:
        """Return the rows that draft the first token, all committed, and the target's hidden states before
        them, [rows, feature_size].
        """
        batch: list[SequenceRows] = []
        features: list[Tensor] = []
        for sequence in sequences:
            known = self._known[sequence.request_id]
            newest = len(sequence.token_ids) - 1
            if known.end != newest + 1:  # steps went by unseen
                known.begin(newest)
            if not known.features:  # its last token was computed elsewhere, or unseen
                known.written, known.features, known.carried = newest, [self._no_feature], None
            token_ids = sequence.token_ids[known.written :]
            tables = sequence.held.blocks
            batch.append(SequenceRows(token_ids, known.written, tables, first_key=known.first))
            features += [piece.cut() for piece in known.features]
            known.features = []
            known.written = len(sequence.token_ids)
        return batch, torch.cat(features) if len(features) > 1 else features[0]

    def _give_carried(self, sequences: Iterable[SequenceState]) -> None:
        """Have further heads read what they read after the rows that they have run of these sequences."""
        if isinstance(self._runner, SeveralHeads):
            carried = (self._known[sequence.request_id].carried for sequence in sequences)
            self._runner.carried = torch.stack(
                [self._nothing_carried if each is None else each for each in carried]
            )

    def _take_carried(self, sequences: Iterable[SequenceState]) -> None:
        if isinstance(self._runner, SeveralHeads):
            assert self._runner.carried is not None
            for sequence, carried in zip(sequences, self._runner.carried, strict=True):
                self._known[sequence.request_id].carried = carried

    def _write(self, waiting: Mapping[SequenceState, Known]) -> None:
        """Write the KV of all known pairs but the newest, whose place may have no block yet."""
        batch: list[SequenceRows] = []
        features: list[Tensor] = []
        for sequence, known in waiting.items():
            start, end = known.written, known.end - 1
            token_ids, tables = sequence.token_ids[start:end], sequence.held.blocks
            batch.append(SequenceRows(token_ids, start, tables, first_key=known.first))
            features.append(torch.cat([piece.cut() for piece in known.features])[:-1])
            known.written, known.features = end, [known.features[-1].newest()]
        self._give_carried(waiting)
        self._runner.run(Step(batch, [], hidden=self._combine(torch.cat(features))))
        self._take_carried(waiting)

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        place = sequence.num_computed
        if place == 0:
            known = Known(first=1, written=1)
        elif num_drafted > place and feature is None:
            known = Known(first=1, written=place + 1)
        else:
            row, carried = self._no_feature, None
            if feature is not None:
                size = self._head.feature_size
                row, carried = HiddenRows(feature[:size].unsqueeze(0), range(1)), feature[size:]
                carried = carried.view_as(self._nothing_carried)
            known = Known(1 if num_drafted >= place else place, place, [row], carried)
        self._known[sequence.request_id] = known

    def feature(self, request_id: str) -> Tensor | None:
        known = self._known.get(request_id)
        if known is None or not known.features:
            return None
        newest = known.features[-1].cut()[-1]
        if not self.further_features:
            return newest
        carried = self._nothing_carried if known.carried is None else known.carried
        return torch.cat([newest, carried.flatten()])
