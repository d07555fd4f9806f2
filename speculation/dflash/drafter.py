"""Drafting with DFlash: one pass over a block of masks drafts all tokens (Chen et al. 2026).

The layers see a text as keys and values that `Context` makes of the target's hidden states. They lie in the
places of the text's tokens, of which the last committed one has no hidden states yet: it begins the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import Step
from engine.copies import Downloader, upload_to
from engine.devices.attention import select_backend
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import DRAFT, Group, Segment
from engine.kv.pool import KVPool
from engine.load.select import runner_of_head
from engine.model.describe import rotations_of
from engine.quantization.weight import CodeFormat
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.dflash.attention import BlockBackend
from speculation.dflash.weights import load_dflash
from speculation.drafter import Computed, Drafter, HiddenRows
from speculation.drawing import Drawing, in_whole_vocabulary

_SIGHT = 64
"""Tokens of context with which drafts are about as good as with a whole text."""
_MOST_UNREAD = 32
"""Tokens of a request whose hidden states are kept, each with its whole step's, until a draft reads them."""


@dataclass(slots=True, eq=False)
class Known:
    """A request's context: places from `first` up to, not including, `written` have draft KV, and `features`
    are the hidden states of the tokens in the next places, in pieces.
    """

    first: int
    written: int
    features: list[HiddenRows] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first place whose hidden states are not known."""
        return self.written + sum(map(len, self.features))

    @property
    def is_blind(self) -> bool:
        """Whether the context is little more than the newest tokens of a longer text."""
        return self.first > 0 and self.end - self.first < _SIGHT

    def forget_before(self, place: int) -> None:
        self.first = self.written = place
        self.features = []


class DFlashDrafter(Drafter):
    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
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
        self._drawing = Drawing(self._sampler, options.verification)
        self._upload, self._download = upload_to(target.device), Downloader(target.device)
        self._known: dict[str, Known] = {}

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        draft, layers = self._draft, pool.layers(DRAFT)
        kind, _ = select_backend(loaded.device, loaded.dtype, self._config.attention_backend)
        draft.complete(loaded)
        rotation = rotations_of(draft.layers.model.rotary_emb)[None]
        draft.context.attach(rotation, draft.max_positions, layers)
        self._runner = runner_of_head(
            self._config,
            draft.program,
            draft.layers,
            draft.max_positions,
            loaded,
            BlockBackend(kind, layers, draft.sights),
        )
        self._vocab_size, self._block_size = loaded.vocab_size, pool.block_size

    def warm_up(self) -> None:
        self._runner.warm_up()

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        for sequence in sequences:
            known, newest = self._known[sequence.request_id], len(sequence.token_ids) - 1
            if known.end != newest:  # steps went by unseen
                known.forget_before(newest)
        self._write(sequences)
        rooms = [min(count, self._draft.block_size - 1) for count in counts]
        logits = self._logits(sequences, rooms)
        return self._drafts(sequences, rooms, logits)

    def _logits(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> Tensor:
        """Return logits [sequences, most tokens, vocab_size]. Those behind a draft's end mean nothing."""
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
        if self._draft.softcap:
            logits = torch.tanh(logits / self._draft.softcap) * self._draft.softcap
        whole = in_whole_vocabulary(logits, self._draft.draft_ids, self._vocab_size)
        return whole.unflatten(0, (len(sequences), rooms[0]))

    def _drafts(
        self, sequences: Sequence[SequenceState], rooms: Sequence[int], logits: Tensor
    ) -> list[Draft | None]:
        tokens, distributions = self._drawing.draw_at_once(sequences, logits)
        late = LateTokens(tokens.clamp_min(0), self._download)
        drafts: list[Draft | None] = []
        for number, (sequence, room) in enumerate(zip(sequences, rooms, strict=True)):
            places = range(number * rooms[0], number * rooms[0] + room)
            drawn = None
            if distributions is not None and not sequence.params.is_greedy:
                drawn = distributions[places.start : places.stop]
            draft = Draft([~place for place in places], distributions=drawn, late=late)
            draft.is_blind = self._known[sequence.request_id].is_blind
            drafts.append(draft)
        return drafts

    @torch.inference_mode()
    def observe(self, computed: Sequence[Computed]) -> None:
        is_due = False
        for each in computed:
            assert each.hidden is not None
            sequence = each.sequence
            known = self._known[sequence.request_id]
            if known.end != each.start:  # steps went by unseen
                known.forget_before(each.start)
            known.features.append(each.hidden)
            # A prompt's draft KV goes along with its blocks. What is generated is read by the next draft.
            is_due |= each.start < len(sequence.prompt_token_ids) or known.end - known.written >= _MOST_UNREAD
        if is_due:  # all of them at once, so that it is seldom
            self._write([each.sequence for each in computed])

    def _write(self, sequences: Sequence[SequenceState]) -> None:
        """Write the KV of all known places."""
        features: list[Tensor] = []
        places: list[np.ndarray] = []
        blocks: list[np.ndarray] = []
        for sequence in sequences:
            known = self._known[sequence.request_id]
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
        self._known[sequence.request_id] = Known(0 if num_drafted >= place else place, place)

    def num_drafted(self, request_id: str) -> int:
        known = self._known.get(request_id)
        return known.written if known is not None and known.first == 0 else 0

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._sampler.forget(request_id)
