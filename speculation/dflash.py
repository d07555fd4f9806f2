"""Drafting with DFlash: one pass over a block of masks drafts all tokens (Chen et al. 2026).

The layers see a text as keys and values that `Context` makes of the target's hidden states, in the tokens'
places. The last committed token has none yet: it is the block's first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.copies import upload_to
from engine.devices.attention import TablesBackend, select_backend
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch.operations import capped
from engine.kv.attention import AttentionBackend, AttentionMetadata, LayerKv
from engine.kv.layout import DRAFT, Group, Segment
from engine.kv.pool import KVPool
from engine.load.select import runner_of_head
from engine.model.describe import rotations_of
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.dflash_weights import load_dflash
from speculation.drawing import Drawing
from speculation.target_states import DraftedKv, DraftKvDrafter


class DFlashDrafter(DraftKvDrafter):
    shift = 0

    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        super().__init__()
        assert options.model is not None
        self._config = config
        self._draft = load_dflash(options.model, target)
        if options.quantization is not None:
            self._draft.round(CodeFormat(options.quantization), target)
        own = self._draft.layers.config
        segment = Segment(own.num_hidden_layers, own.num_key_value_heads, own.head_dim, target.dtype)
        self.kv_group = Group.uniform(DRAFT, segment)
        self.hidden_layers = self._draft.hidden_layers
        self._sampler = Sampler(target.vocab_size, target.device, target.eos_token_ids)
        self._drawing = Drawing(self._sampler, options.verification, self._draft.draft_ids)
        self._upload = upload_to(target.device)

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        draft, layers = self._draft, pool.layers(DRAFT)
        kind, _ = select_backend(loaded.device, loaded.dtype, self._config.attention_backend)
        draft.complete(loaded)
        rotation = rotations_of(draft.layers.model.rotary_emb)[None]
        draft.context.attach(rotation, draft.max_positions, pool.segment(DRAFT))
        self._runner = runner_of_head(
            self._config,
            draft.program,
            draft.layers,
            draft.max_positions,
            loaded,
            BlockBackend(kind, layers, draft.layer_windows),
        )
        self._block_size = pool.block_size

    def warm_up(self) -> None:
        self._runner.warm_up()

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        for sequence in sequences:
            known, newest = self._known[sequence.request_id], len(sequence.token_ids) - 1
            if known.end != newest:  # some steps were not observed
                known.begin(newest)
        self._write({each: self._known[each.request_id] for each in sequences})
        rooms = [min(count, self._draft.block_size - 1) for count in counts]
        drafts = self._drawing.draft_at_once(sequences, rooms, self._logits(sequences, rooms))
        for sequence, draft in zip(sequences, drafts, strict=True):
            draft.is_blind = self._known[sequence.request_id].is_blind
        return [*drafts]

    def _logits(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> Tensor:
        """Return logits [sequences, most tokens, draft vocabulary]. They mean nothing after a draft's end."""
        batch = [
            SequenceRows(
                [sequence.token_ids[-1], *[self._draft.mask_token_id] * room],
                len(sequence.token_ids) - 1,
                sequence.held.blocks,
                first_key=self._known[sequence.request_id].first,
            )
            for sequence, room in zip(sequences, rooms, strict=True)
        ]
        ends = accumulate(len(rows.token_ids) for rows in batch)
        masks = [
            end - room + min(place, room - 1)
            for end, room in zip(ends, rooms, strict=True)
            for place in range(rooms[0])
        ]
        logits = self._runner.run(Step(batch, masks, wants_hidden=False)).logits
        if self._draft.logit_scale != 1:
            logits = logits * self._draft.logit_scale
        return capped(logits, self._draft.softcap).unflatten(0, (len(sequences), rooms[0]))

    def _write(self, waiting: Mapping[SequenceState, DraftedKv]) -> None:
        features: list[Tensor] = []
        places: list[np.ndarray] = []
        blocks: list[np.ndarray] = []
        for sequence, known in waiting.items():
            its = np.arange(known.written, known.end)
            features += [piece.cut() for piece in known.features]
            places.append(its)
            blocks.append(np.array(sequence.held.blocks[0], np.int64)[its // self._block_size])
            known.written, known.features = known.end, []
        if not features:
            return
        joined = np.concatenate(places)
        uploaded = self._upload([joined, np.concatenate(blocks), joined % self._block_size])
        self._draft.context.write(torch.cat(features), *uploaded)

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        place = sequence.num_computed
        self._known[sequence.request_id] = DraftedKv(0 if num_drafted >= place else place, place)


class BlockBackend(TablesBackend):
    """Attention over the layers of one pool, each with its window. None: rows are causal. Otherwise a row
    sees all later rows and, up to and including itself, as many tokens as its window (0: all).
    """

    is_causal = False

    def __init__(
        self, backend: type[AttentionBackend], layers: Sequence[LayerKv], layer_windows: Sequence[int | None]
    ) -> None:
        self._layer_windows = list(dict.fromkeys(layer_windows))
        tables = list(map(self._layer_windows.index, layer_windows))
        super().__init__([backend(layers) for _ in self._layer_windows], tables)
        self.num_tables, self.can_capture = 1, False

    def begin_step(self, metadata: AttentionMetadata) -> None:
        for window, backend in zip(self._layer_windows, self.backends, strict=True):
            backend.begin_step(metadata if window is None else _whole(metadata, window))


def _whole(metadata: AttentionMetadata, window: int) -> AttentionMetadata:
    """Make each row a sequence of its own with the keys of all rows."""
    starts = metadata.query_start.long()
    counts = starts.diff()
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    rows = torch.arange(len(owners), device=counts.device)
    context_len = metadata.context_len[owners]
    first_key = torch.zeros_like(context_len)
    if metadata.first_key is not None:
        first_key = metadata.first_key[owners]
    if window:
        places = context_len - counts[owners] + rows - starts[owners]
        first_key = first_key.maximum(places + 1 - window).int()
    return replace(
        metadata,
        query_start=torch.arange(len(owners) + 1, dtype=torch.int32, device=counts.device),
        context_len=context_len,
        block_table=metadata.block_table[owners],
        first_key=first_key,
        max_query_len=1,
        query_lens=[1] * len(owners),
    )
