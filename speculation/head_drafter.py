"""Drafting with EAGLE and MTP heads, one or several, each of one layer, over the hidden states of the
target's steps.

A place's row is the pair of its token and the hidden state before it. Rows of committed tokens have the
target's hidden states, which `observe` brings; only rows of draft tokens have the head's own. Their KV is
overwritten when the target's states arrive: keeping it costs a tenth of the accepted length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Runner, Step
from engine.batch.step_inputs import SequenceRows
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
from speculation.chains import DraftRows
from speculation.drafter import HiddenRows
from speculation.target_states import DraftedKv, DraftKvDrafter
from speculation.tree_drafting import drafting_of


class DraftHead(ABC):
    """A decoder layer over pairs of a token and the target's hidden state before it, or several such heads.

    A head reads the target's `hidden_layers`, numbered as in Transformers' `hidden_states`, together
    `feature_size` wide, and keeps its KV in `kv_group`. `draft_ids`, int64 [draft_vocab_size], are the
    target's ids of the tokens that it can draft; None if it can draft all.
    """

    hidden_layers: tuple[int, ...]
    feature_size: int
    kv_group: Group
    draft_ids: Tensor | None = None
    num_heads = 1
    mixes_in_program = False
    """Whether a native runner takes features [rows, feature_size] without `combine`."""

    def combine(self, features: Tensor) -> Tensor:
        """Map the target's hidden states [..., feature_size] to the input of rows [..., hidden_size]."""
        return features

    @abstractmethod
    def runner(
        self,
        config: ServeConfig,
        target: LoadedModel,
        kv: Sequence[LayerKv],
        backend: type[AttentionBackend],
    ) -> Runner:
        """Return a runner of the head, for several heads a `SeveralHeads`. To be called once."""


class HeadDrafter(DraftKvDrafter):
    shift = 1

    def __init__(self, head: DraftHead, options: SpeculativeConfig, config: ServeConfig) -> None:
        super().__init__()
        self._options, self._config, self._head = options, config, head
        self.kv_group, self.hidden_layers = head.kv_group, head.hidden_layers
        self.carried_features = head.num_heads - 1
        self._combine = head.combine

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        device, dtype = loaded.device, loaded.dtype
        backend_class, _ = select_backend(device, dtype, self._config.attention_backend)
        self._runner = self._head.runner(self._config, loaded, pool.layers(DRAFT), backend_class)
        self._sampler = Sampler(loaded.vocab_size, device, loaded.eos_token_ids)
        self._drafting = drafting_of(
            self._runner,
            self._options,
            self._draft_rows,
            self._sampler,
            self._head.draft_ids,
            block_size=self._config.block_size,
            recurs=loaded.recurrent is not None,
        )
        feature = torch.zeros((1, self._head.feature_size), dtype=dtype, device=device)
        self._no_feature = HiddenRows(feature, range(1))
        self._nothing_carried = feature.new_zeros((self.carried_features, loaded.hidden_size))

    def warm_up(self) -> None:
        self._runner.warm_up()
        self._drafting.warm_up(self._no_feature.cut())

    @torch.inference_mode()
    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        rows, features = self._committed_rows(sequences)
        self._give_carried(sequences)
        mixes = self._head.mixes_in_program and self._drafting.is_native(sequences)
        hidden = features if mixes else self._combine(features)
        drafts = self._drafting.draft(sequences, rows, counts, hidden)
        self._take_carried(sequences)
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft is not None:
                draft.is_blind = self._known[sequence.request_id].is_blind
        return [*drafts]

    def _draft_rows(self, sequence: SequenceState, rows: DraftRows) -> SequenceRows:
        root, first_key = len(sequence.token_ids) - 1, self._known[sequence.request_id].first
        start, tables = root + rows.first, sequence.held.blocks
        return SequenceRows(rows.token_ids, start, tables, rows.masks, root, first_key)

    def _committed_rows(self, sequences: Sequence[SequenceState]) -> tuple[list[SequenceRows], Tensor]:
        """Return the committed rows that draft, and the states before them, [rows, feature_size]."""
        batch: list[SequenceRows] = []
        features: list[Tensor] = []
        for sequence in sequences:
            known = self._known[sequence.request_id]
            newest = len(sequence.token_ids) - 1
            if known.end != newest + 1:  # some steps were not observed
                known.begin(newest)
            if not known.features:  # another worker computed its last token, or it was not observed
                known.written, known.features, known.carried = newest, [self._no_feature], None
            token_ids = sequence.token_ids[known.written :]
            tables = sequence.held.blocks
            batch.append(SequenceRows(token_ids, known.written, tables, first_key=known.first))
            features += [piece.cut() for piece in known.features]
            known.features = []
            known.written = len(sequence.token_ids)
        return batch, _joined(features)

    def _give_carried(self, sequences: Iterable[SequenceState]) -> None:
        """Set the inputs of further heads for the rows after those that they have run of these sequences."""
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

    def _write(self, waiting: Mapping[SequenceState, DraftedKv]) -> None:
        """Write the KV of all known pairs except the newest, whose place may have no block yet."""
        batch: list[SequenceRows] = []
        features: list[Tensor] = []
        for sequence, known in waiting.items():
            start, end = known.written, known.end - 1
            token_ids, tables = sequence.token_ids[start:end], sequence.held.blocks
            batch.append(SequenceRows(token_ids, start, tables, first_key=known.first))
            features.append(_joined([piece.cut() for piece in known.features])[:-1])
            known.written, known.features = end, [known.features[-1].newest()]
        self._give_carried(waiting)
        self._runner.run(Step(batch, [], hidden=self._combine(_joined(features))))
        self._take_carried(waiting)

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        place = sequence.num_computed
        if place == 0:
            known = DraftedKv(first=1, written=1)
        elif num_drafted > place and feature is None:
            known = DraftedKv(first=1, written=place + 1)
        else:
            row, carried = self._no_feature, None
            if feature is not None:
                size = self._head.feature_size
                row, carried = HiddenRows(feature[:size].unsqueeze(0), range(1)), feature[size:]
                carried = carried.view_as(self._nothing_carried)
            known = DraftedKv(1 if num_drafted >= place else place, place, [row], carried)
        self._known[sequence.request_id] = known

    def feature(self, request_id: str) -> Tensor | None:
        known = self._known.get(request_id)
        if known is None or not known.features:
            return None
        newest = known.features[-1].cut()[-1]
        if not self.carried_features:
            return newest
        carried = self._nothing_carried if known.carried is None else known.carried
        return torch.cat([newest, carried.flatten()])


class SeveralHeads(Runner):
    """The MTP heads of a checkpoint as one draft head: head i drafts the i-th token.

    A head's row at a place has the place's token and a hidden state. The first head reads the target's state
    of the previous place. Each further head reads the previous head's output at the previous place or, with
    `reads_target`, the state that the previous head read there. So a head's KV at a place depends only on the
    tokens up to that place: it stays right for all later drafts, moves with the target's KV and is found with
    prefixes. Beyond the number of heads the last one drafts, from its own output. `heads` return the hidden
    states of all rows.
    """

    chains = None
    any_threads = deterministic = False
    choice = "several heads"

    def __init__(self, heads: Sequence[Runner], *, reads_target: bool) -> None:
        self._heads, self._reads_target = heads, reads_target
        self.products, self.can_fill = heads[0].products, heads[0].can_fill
        self._depth = 0
        """The depth of the newest rows: i for the rows of the i-th draft token, 0 for committed rows."""
        self.carried: Tensor | None = None
        """The further heads' hidden states for the place after the newest committed rows, [sequences, further
        heads, hidden_size]. Before a call with committed rows: for the first place of these rows.
        """

    def warm_up(self) -> float:
        return sum(head.warm_up() for head in self._heads)

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Run committed rows with the target's states, or drafted ones of one depth with the last call's."""
        if step.batch[0].tree_start is None:
            self._depth = 0
            return self._run_committed(step)
        self._depth += 1
        return self._run_drafted(step, fill)

    def _run_committed(self, step: Step) -> ForwardOutput:
        """Run the rows through all heads, so that each has the KV of all places. The first one drafts."""
        assert step.hidden is not None and self.carried is not None
        read = [*step.hidden.split([len(rows.token_ids) for rows in step.batch])]
        logits, made = self._run_head(0, step.batch, step.logit_rows, read)
        after = []
        for number, before in enumerate(self.carried.unbind(1), start=1):
            inputs = read if self._reads_target else made
            ends = zip(before, inputs, strict=True)
            after.append(torch.stack([states[-1] if len(states) else old for old, states in ends]))
            read = [
                _shifted(rows, number, *states)
                for rows, *states in zip(step.batch, before.split(1), inputs, strict=True)
            ]
            _, made = self._run_head(number, step.batch, (), read)
        self.carried = torch.stack(after, dim=1)
        return ForwardOutput(logits, self.carried.flatten(1))

    def _run_head(
        self, number: int, batch: Sequence[SequenceRows], logit_rows: Sequence[int], read: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the last rows of each sequence, those with hidden states. Return logits and outputs."""
        later = [
            replace(
                rows,
                token_ids=rows.token_ids[-len(states) :],
                start=rows.start + len(rows.token_ids) - len(states),
                first_key=rows.first_key + number,
            )
            for rows, states in zip(batch, read, strict=True)
            if len(states)
        ]
        hidden = torch.cat([*read])
        if not later:
            return hidden, read
        output = self._heads[number].run(Step(later, logit_rows, hidden=hidden))
        assert output.hidden is not None
        return output.logits, output.hidden.split([*map(len, read)])

    def _run_drafted(self, step: Step, fill: Fill | None) -> ForwardOutput:
        """Run the rows through the head that drafts after them, and later heads, which see them later."""
        assert step.hidden is not None
        last = len(self._heads) - 1
        first = min(self._depth, last)
        read = step.hidden.unflatten(1, (last, -1)).unbind(1)
        after = [*read]
        logits = step.hidden
        for number in range(first, last + 1):
            batch = [
                replace(rows, first_key=min(rows.first_key + number, (rows.tree_start or 0) + 1))
                for rows in step.batch
            ]
            wanted = step.logit_rows if number == first else ()
            output = self._heads[number].run(Step(batch, wanted, hidden=read[number - 1]), fill)
            assert output.hidden is not None
            if number == first:
                logits = output.logits
            if number < last:
                after[number] = read[number - 1] if self._reads_target else output.hidden
            elif first == last:
                after[-1] = output.hidden
        return ForwardOutput(logits, torch.cat(after, dim=1))


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate pieces. Torch would copy a single one, on all threads, which may have no core now."""
    return torch.cat([*pieces]) if len(pieces) > 1 else pieces[0]


def _shifted(rows: SequenceRows, number: int, before: Tensor, states: Tensor) -> Tensor:
    """Return the hidden states of a further head's rows: `states` are those after the previous head's
    rows, `before` is the one before these. The head's first place is `number` places after the first head's.
    """
    return states[:-1] if rows.start < rows.first_key + number else torch.cat([before, states[:-1]])
