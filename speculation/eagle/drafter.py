"""Drafting with EAGLE heads: the target's hidden states come in with each step, drafts go out of one layer.

A place is drafted from the pair of its token and the hidden state before it. The pairs of committed tokens
have the target's hidden states, which `observe` brings; only the drafted places behind them run on the head's
own, and their KV is overwritten as soon as the target's are there (keeping it costs a tenth of the accepted
length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from engine.batch.rows import SequenceRows
from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.attention import select_backend
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import DRAFT, Group, Segment
from engine.kv.pool import KVPool
from engine.load.select import runner_of_head
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.chains_ahead import chains_ahead
from speculation.drafter import Computed, Drafter, HiddenRows
from speculation.drawing import Chain, Drawing
from speculation.eagle.head import head_program
from speculation.eagle.weights import load_head
from speculation.native_chain import NativeChain
from speculation.tree import TreeRows
from speculation.tree_drafting import TreeDrafting, can_grow_on_device

_SIGHT = 64
"""Tokens behind which a head's drafts are about as good as behind a whole text."""
_MOST_UNREAD = 32
"""Tokens of a request whose hidden states are kept, each with its whole step's, until a draft reads them."""


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a request: draft KV of the places from `first` up to, not including, `written`, and
    `features`, the hidden states of the tokens before each of the next places, in pieces.
    """

    first: int
    written: int
    features: list[HiddenRows] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first place whose pair is not known."""
        return self.written + sum(map(len, self.features))

    @property
    def is_blind(self) -> bool:
        """Whether the head sees little more than the newest tokens of a longer text."""
        return self.first > 1 and self.end - self.first < _SIGHT


class EagleDrafter(Drafter):
    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        assert options.model is not None
        self._options = options
        self._config = config
        self._loaded = load_head(options.model, target)
        if options.quantization is not None:
            self._loaded.round(CodeFormat(options.quantization), target)
        shape = self._loaded.head.shape
        segment = Segment(1, shape.num_kv_heads, shape.head_dim, target.dtype)
        self.kv_group = Group.uniform(DRAFT, segment)
        self.hidden_layers = shape.captured
        self._combine = self._loaded.head.combine
        self._known: dict[str, Known] = {}

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        device, dtype = loaded.device, loaded.dtype
        backend_class, _ = select_backend(device, dtype, self._config.attention_backend)
        backend = backend_class(pool.layers(DRAFT), pool.groups[DRAFT].block_pool)
        head, (embedding, lm_head) = self._loaded.head, self._loaded.tables(loaded)
        parts, draft_ids = nn.ModuleList([head, lm_head]), self._loaded.draft_ids
        self._runner = runner_of_head(
            self._config,
            lambda: head_program(head, embedding, parts[1], draft_ids),
            parts,
            head.shape.max_positions,
            loaded,
            backend,
        )
        self._native: NativeChain | None = None
        if isinstance(self._runner, NativeDecoder):
            self._native = NativeChain(self._runner, loaded.vocab_size, self._options.verification)
            self._mixes_natively = head.mixing is not None
        self._sampler = Sampler(loaded.vocab_size, device, loaded.eos_token_ids)
        self._drawing = Drawing(self._sampler, self._options.verification)
        self._ahead = chains_ahead(self._runner, self._drawing, device, self._drafted_row)
        self._tree_drafting = TreeDrafting(
            self._options, device, self._config.block_size, on_device=can_grow_on_device(self._runner, loaded)
        )
        self._vocab_size = loaded.vocab_size
        feature_size = self._loaded.head.shape.feature_size
        self._no_feature = HiddenRows(torch.zeros((1, feature_size), dtype=dtype, device=device), range(1))

    def warm_up(self) -> None:
        self._runner.warm_up()
        if self._options.tree:
            self._tree_drafting.warm_up(self._no_feature.cut())

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        drafts = self._trees(sequences, counts) if self._options.tree else self._chains(sequences, counts)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft is not None:
                draft.is_blind = self._known[sequence.request_id].is_blind
        return drafts

    def _chains(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        rows, features = self._committed_rows(sequences)
        if self._native is not None and self._native.can_draft(sequences):
            before = features if self._mixes_natively else self._combine(features)
            return [*self._native.draft(sequences, rows, counts, before)]
        logits, hidden = self._run(rows, self._combine(features))
        if self._ahead is not None and self._ahead.can_draft(sequences):
            return [*self._ahead.draft(sequences, counts, ForwardOutput(logits, hidden), self._whole)]
        chains = [Chain(sequence) for sequence in sequences]
        wanted = dict(zip(sequences, counts, strict=True))
        self._drawing.extend(chains, self._whole(logits))
        growing = chains
        while still := [i for i, each in enumerate(growing) if len(each.token_ids) < wanted[each.sequence]]:
            growing, hidden = [growing[i] for i in still], hidden[still]
            batch = [
                self._drafted_row(each.sequence, each.token_ids[-1], len(each.token_ids) - 1)
                for each in growing
            ]
            logits, hidden = self._run(batch, hidden)
            self._drawing.extend(growing, self._whole(logits))
        return [chain.draft() for chain in chains]

    def _drafted_row(self, sequence: SequenceState, token_id: int, place: int) -> SequenceRows:
        first = self._known[sequence.request_id].first
        return SequenceRows(
            [token_id], len(sequence.token_ids) + place, sequence.held.blocks, first_key=first
        )

    def _trees(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        rows, features = self._committed_rows(sequences)
        logits, hidden = self._run(rows, self._combine(features))

        def run(grown: list[TreeRows], before: Tensor | None, fill: Fill | None) -> ForwardOutput:
            assert before is not None
            batch = [
                self._tree_rows(sequence, rows)
                for sequence, rows in zip(sequences, grown, strict=True)
                if rows.token_ids
            ]
            every = range(len(before))
            logits, hidden = self._after(batch, every, before, fill)
            return ForwardOutput(self._whole(logits), hidden)

        return self._tree_drafting.draft(sequences, counts, ForwardOutput(self._whole(logits), hidden), run)

    def _tree_rows(self, sequence: SequenceState, rows: TreeRows) -> SequenceRows:
        root, first_key = len(sequence.token_ids) - 1, self._known[sequence.request_id].first
        return SequenceRows(
            rows.token_ids, root + rows.first, sequence.held.blocks, rows.masks, root, first_key
        )

    def _whole(self, logits: Tensor) -> Tensor:
        """In the target's vocabulary, [rows, vocab_size]."""
        draft_ids = self._loaded.draft_ids
        if draft_ids is None:
            return logits[:, : self._vocab_size]
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        whole[:, draft_ids] = logits
        return whole

    def _committed_rows(self, sequences: Sequence[SequenceState]) -> tuple[list[SequenceRows], Tensor]:
        """The rows that draft the first token, from committed ones alone, and the target's hidden states
        before them, [rows, feature_size].
        """
        batch: list[SequenceRows] = []
        features: list[Tensor] = []
        for sequence in sequences:
            known = self._known[sequence.request_id]
            newest = len(sequence.token_ids) - 1
            if known.end != newest + 1:  # steps went by unseen
                known.first, known.features = newest, []
            if not known.features:  # its last token was computed elsewhere, or unseen
                known.written, known.features = newest, [self._no_feature]
            token_ids = sequence.token_ids[known.written :]
            tables = sequence.held.blocks
            batch.append(SequenceRows(token_ids, known.written, tables, first_key=known.first))
            features += [piece.cut() for piece in known.features]
            known.features = []
            known.written = len(sequence.token_ids)
        return batch, torch.cat(features) if len(features) > 1 else features[0]

    def _run(self, batch: list[SequenceRows], before: Tensor) -> tuple[Tensor, Tensor]:
        """After each sequence's last row: logits [sequences, draft_vocab_size] and hidden states."""
        return self._after(batch, [n - 1 for n in accumulate(len(rows.token_ids) for rows in batch)], before)

    def _after(
        self, batch: list[SequenceRows], ends: Sequence[int], before: Tensor, fill: Fill | None = None
    ) -> tuple[Tensor, Tensor]:
        """After these of the rows: logits [ends, draft_vocab_size] and hidden states [ends, hidden_size]."""
        logits, fed_back = self._runner.run(Step(batch, ends, hidden=before), fill)
        assert fed_back is not None
        return logits, fed_back

    @torch.inference_mode()
    def observe(self, computed: Sequence[Computed]) -> None:
        waiting: dict[SequenceState, Known] = {}
        is_due = False
        for each in computed:
            assert each.hidden is not None
            sequence, end = each.sequence, each.start + each.num_tokens
            known = self._known[sequence.request_id]
            if known.end != each.start + 1:  # steps went by unseen
                known.first = known.written = each.start + 1
                known.features = []
                waiting.pop(sequence, None)
            known.features.append(each.hidden)
            if known.written < end:
                waiting[sequence] = known
                # A prompt's draft KV goes along with its blocks. What is generated is read by the next draft.
                is_due |= each.start < len(sequence.prompt_token_ids) or end - known.written >= _MOST_UNREAD
        if is_due and waiting:  # all of them at once, so that it is seldom
            self._write(waiting)

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
        self._runner.run(Step(batch, [], hidden=self._combine(torch.cat(features))))

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        place = sequence.num_computed
        if place == 0:
            known = Known(first=1, written=1)
        elif num_drafted > place and feature is None:
            known = Known(first=1, written=place + 1)
        else:
            row = self._no_feature if feature is None else HiddenRows(feature.unsqueeze(0), range(1))
            known = Known(1 if num_drafted >= place else place, place, [row])
        self._known[sequence.request_id] = known

    def num_drafted(self, request_id: str) -> int:
        known = self._known.get(request_id)
        return known.written if known is not None and known.first == 1 else 0

    def feature(self, request_id: str) -> Tensor | None:
        known = self._known.get(request_id)
        return known.features[-1].cut()[-1] if known is not None and known.features else None

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._sampler.forget(request_id)
