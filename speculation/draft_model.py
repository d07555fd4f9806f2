"""Drafting with a small model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The draft model's KV is a second group under the target's block ids. It drafts chains, or trees
(`speculation.tree_growth`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine import limits
from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import select_backend
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import DRAFT
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateSlots
from engine.load.loader import ModelShape, load_model
from engine.load.select import runner_of
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from protocol.speculation import SpeculativeConfig
from speculation.chains import DraftRows
from speculation.control.estimator import default_drafted
from speculation.drafter import ComputedRows, Drafter
from speculation.tree_drafting import drafting_of

_READ_AT_ONCE = 2048
"""The most tokens that one step reads, so that other requests do not wait long for their next token."""


def draft_config(config: ServeConfig, options: SpeculativeConfig, target_dtype: torch.dtype) -> ServeConfig:
    """Return the configuration of a target's draft model, which has no adapters."""
    dtype: Any = str(target_dtype).removeprefix("torch.")
    assert options.model is not None
    return replace(
        config,
        model=options.model,
        dtype=dtype,
        quantization=options.quantization,
        revision=None,
        max_model_len=None,
        kv_cache_dtype="auto",
        enable_lora=False,
        lora_modules=None,
    )


def check_draft(draft: LoadedModel | ModelShape, target: LoadedModel | ModelShape) -> None:
    """Raise `ConfigError` for a draft whose vocabulary or longest text is smaller than the target's."""
    limits.check_draft(draft.vocab_size, draft.max_model_len, target.vocab_size, target.max_model_len)


class DraftModel(Drafter):
    def __init__(self, options: SpeculativeConfig, config: ServeConfig, target: LoadedModel) -> None:
        assert options.model is not None
        self._options = options
        self._config = draft_config(config, options, target.dtype)
        try:
            self._loaded = load_model(self._config)
        except (ConfigError, UnsupportedModelError) as error:
            reason = str(error).removeprefix("--model: ").removeprefix("--")
            raise ConfigError(f"--speculative-config: model: {reason}") from error
        check_draft(self._loaded, target)
        if self._loaded.recurrent is not None:
            if options.prefill == "carry":
                raise ConfigError(
                    "--speculative-config: prefill: the state of a draft model with recurrent layers is not "
                    "carried to decode workers: must be auto or rebuild"
                )
            self.state_layout = self._loaded.recurrent.state.with_drafts(default_drafted(options))
        self._vocab_size = target.vocab_size
        self.kv_group = replace(self._loaded.kv_group, name=DRAFT)
        self._window = max(self.kv_group.layer_windows)
        self._computed: dict[str, int] = {}
        """Leading places with the draft model's KV, and in its state if it has one, by request id."""
        self._state_slots: DraftStateSlots | None = None

    def attach(self, loaded: LoadedModel, pool: KVPool) -> None:
        device = self._loaded.device
        backend_class, _ = select_backend(device, self._loaded.dtype, self._config.attention_backend)
        backend = backend_class(pool.layers(DRAFT))
        self._runner = runner_of(
            self._config, self._loaded, backend, state_slots=pool.draft_state_slots, drafts=True
        )
        if pool.draft_state_slots is not None:
            self._state_slots = DraftStateSlots(pool.draft_state_slots)
        self._sampler = Sampler(self._vocab_size, device, loaded.eos_token_ids)
        self._drafting = drafting_of(
            self._runner,
            self._options,
            self._draft_rows,
            self._sampler,
            block_size=self._config.block_size,
            recurs=self._loaded.recurrent is not None or loaded.recurrent is not None,
        )

    def warm_up(self) -> None:
        self._runner.warm_up()
        self._drafting.warm_up()

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(sequences)
        counts = self._take_state_slots(sequences, counts)
        ready = self._read_up(sequences)
        if ready:
            drafting = [sequences[i] for i in ready]
            found = self._drafting.draft(drafting, self._unread_rows(drafting), [counts[i] for i in ready])
            for index, sequence, draft in zip(ready, drafting, found, strict=True):
                drafts[index] = draft
                is_chain = draft is not None and draft.parents is None
                num_run = draft.num_nodes - 1 if draft is not None and is_chain else 0
                self._computed[sequence.request_id] = len(sequence.token_ids) + num_run
        return drafts

    def _take_state_slots(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> Sequence[int]:
        """Give the sequences state slots; return how many draft tokens each has room for."""
        if self._state_slots is None:
            return counts
        for request_id in self._state_slots.sit(sequence.request_id for sequence in sequences):
            self._computed[request_id] = 0
        layout = self._state_slots.state_slots.layout
        return [min(count, layout.window - layout.grid) for count in counts]

    def _state_slot(self, sequence: SequenceState) -> int:
        return self._state_slots[sequence.request_id] if self._state_slots is not None else 0

    def _read_up(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Return the sequences with so little unread that the first draft reads it; read on in the others.

        A prompt is first read here, not when it is prefilled, so that its first token does not wait for it.
        """
        budget = _READ_AT_ONCE
        ready = []
        for index, sequence in enumerate(sequences):
            unread = len(sequence.token_ids) - self._first_unread(sequence)
            if unread <= budget:
                ready.append(index)
            elif budget > 0:
                self._read(sequence, len(sequence.token_ids) - unread + budget)
            budget -= min(unread, budget)
        return ready

    def _draft_rows(self, sequence: SequenceState, rows: DraftRows) -> SequenceRows:
        root, state_slot = len(sequence.token_ids) - 1, self._state_slot(sequence)
        start, tables, certain = root + rows.first, sequence.held.blocks, root + 1
        return SequenceRows(
            rows.token_ids, start, tables, rows.masks, root, state_slot=state_slot, certain=certain
        )

    def _unread_rows(self, sequences: Sequence[SequenceState]) -> list[SequenceRows]:
        return [self._rows(each, self._first_unread(each), len(each.token_ids)) for each in sequences]

    def _first_unread(self, sequence: SequenceState) -> int:
        """Return the first place to read. Places that the target's window has dropped are not read."""
        return max(self._computed.get(sequence.request_id, 0), sequence.held.first_kept)

    def _rows(self, sequence: SequenceState, start: int, end: int) -> SequenceRows:
        """Return a sequence's own rows. Rows that lag must not see keys that the target has dropped."""
        held = sequence.held
        first_key = held.first_kept if start + 1 - self._window < held.first_kept else 0
        tokens, state_slot = sequence.token_ids[start:end], self._state_slot(sequence)
        return SequenceRows(tokens, start, held.blocks, first_key=first_key, state_slot=state_slot)

    def _read(self, sequence: SequenceState, end: int) -> None:
        """Compute the KV of the committed places up to `end`."""
        start = self._first_unread(sequence)
        while start < end:
            rows = self._rows(sequence, start, min(end, start + _READ_AT_ONCE))
            self._runner.run(Step([rows], [0]))
            start += len(rows.token_ids)
        self._computed[sequence.request_id] = start

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        self._computed[sequence.request_id] = 0 if self._state_slots is not None else num_drafted

    def num_drafted(self, request_id: str) -> int:
        return self._computed.get(request_id, 0)

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        """Keep accepted tokens' KV; read prompts for other workers that do not draft them themselves."""
        for each in computed:
            if each.draft is not None:
                self._keep_accepted(each, each.draft)
            elif self._state_slots is not None:
                continue
            elif each.sequence.prefill_only and not each.sequence.drafts_elsewhere:
                self._read(each.sequence, each.start + each.num_tokens)

    def _keep_accepted(self, computed: ComputedRows, draft: Draft) -> None:
        request_id, first_drafted = computed.sequence.request_id, computed.start + 1
        num_run = self._computed[request_id] - first_drafted
        if num_run < 0:
            return  # another drafter made the draft
        if draft.parents is not None:  # at least the nodes with children were run
            num_run = 1 + max(draft.parents, default=-1)
        kept = sum(node < num_run for node in computed.accepted)
        self._computed[request_id] = first_drafted + kept
        if self._state_slots is not None:
            accepted = computed.accepted[:kept]
            self._state_slots.state_slots.move(self._state_slots[request_id], first_drafted, accepted)

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)
        if self._state_slots is not None:
            self._state_slots.forget(request_id)
        self._sampler.forget(request_id)


class DraftStateSlots:
    """A state slot for each request that drafts. There are as many as sequences that run at a time. A request
    without one takes the slot of the request that has not drafted for longest, which does not run.
    """

    def __init__(self, state_slots: StateSlots) -> None:
        self.state_slots = state_slots
        self._taken: dict[str, int] = {}
        """The slots by request id, in the order of their latest drafts."""

    def __getitem__(self, request_id: str) -> int:
        return self._taken[request_id]

    def sit(self, request_ids: Iterable[str]) -> list[str]:
        """Give slots to these requests, which draft now. Return the requests whose slots they took."""
        newcomers = []
        for request_id in request_ids:
            if request_id in self._taken:
                self._taken[request_id] = self._taken.pop(request_id)
            else:
                newcomers.append(request_id)
        ousted = []
        for request_id in newcomers:
            if not self.state_slots.num_free:
                ousted.append(next(iter(self._taken)))
                self.forget(ousted[-1])
            self._taken[request_id] = self.state_slots.take()
        return ousted

    def forget(self, request_id: str) -> None:
        """Free the request's slot. Unknown ids are ignored."""
        if request_id in self._taken:
            self.state_slots.give_back(self._taken.pop(request_id))
