"""Speculation of one engine: asks drafters, verifies, and keeps account of what it brings."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from engine.block_manager import BlockManager
from engine.kv_pool import KVPool, KVShape
from engine.loader import LoadedModel
from engine.rehearsal import Rehearsal
from engine.sampler import Sampler
from engine.scheduler import ScheduledStep
from engine.sequence import Sequence
from engine.speculator import Verdict
from protocol.config import ServeConfig
from protocol.handoff import REBUILD, DraftState
from protocol.speculation import Method, RequestSpeculation, SpeculationState, SpeculativeConfig
from speculation.account import Account
from speculation.control.calibration import Calibration
from speculation.control.control import Control
from speculation.control.plan import Request
from speculation.drafter import Computed, Drafter
from speculation.methods import build_drafter, draft_shape, most_drafted
from speculation.unread import MOST_STEPS, UnreadSteps
from speculation.verification.verify import prepare, verify


def speculate(config: ServeConfig, loaded: LoadedModel) -> BatchSpeculator:
    """For `Engine`. Raises `ConfigError` for a draft that does not fit the model."""
    return BatchSpeculator(config, loaded)


class BatchSpeculator:
    """Implements `engine.speculator.Speculator`.

    The deployment's method is loaded at once. Those that need no weights are made when a request first asks.
    """

    def __init__(self, config: ServeConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded = loaded
        self._deployed = config.speculative_config
        self._options = self._deployed or SpeculativeConfig(method="ngram")
        self._drafters: dict[Method, Drafter] = {}
        self._requests: dict[str, Request] = {}
        self._num_speculating = 0
        """Requests that have a method. Without any, steps are left alone."""
        self._unread = UnreadSteps()
        self._takes_part = False
        """Whether there were any when the step under way was scheduled."""
        self._rests = False
        """Whether it only goes on with what was chosen before, which is to draft nothing."""
        self._account = Account()
        depth, most = self._options.max_speculative_tokens, most_drafted(self._options)
        self._control = Control(self._account, config.max_num_seqs, depth, most)
        self.segment: KVShape | None = None
        self.hidden_layers: tuple[int, ...] = ()
        if self._deployed is not None:
            drafter = build_drafter(self._deployed.method, self._options, config, loaded)
            self._drafters[self._deployed.method] = drafter
            self.segment, self.hidden_layers = drafter.segment, drafter.hidden_layers
        hidden_size = loaded.model.config.get_text_config(decoder=True).hidden_size
        self._feature_bytes = len(self.hidden_layers) * hidden_size * loaded.dtype.itemsize

    def attach(self, loaded: LoadedModel, pool: KVPool, blocks: BlockManager, sampler: Sampler) -> None:
        self._pool, self._blocks, self._sampler = pool, blocks, sampler
        prepare(self._options.verification, sampler)
        for drafter in self._drafters.values():
            drafter.attach(loaded, pool)

    def warm_up(self, rehearsal: Rehearsal) -> None:
        for method, drafter in self._drafters.items():
            drafter.warm_up()
            shape, times = draft_shape(method, self._options), None
            if self._options.fixed_tokens is None:  # otherwise there is nothing to choose
                calibration = Calibration(rehearsal, self.verify, self._config.max_num_seqs)
                max_rows = self._config.max_num_seqs * (1 + shape.max_tokens)
                self._control.set_target_times(calibration.target(max_rows))
                times = calibration.drafter(drafter, shape)
            self._control.add_method(method, drafter, shape, times)

    def begin(self, sequence: Sequence, num_drafted: int, state: DraftState) -> None:
        method = self._request(sequence).method
        if method is None:
            return
        feature = None
        if state.kind == "carried":
            if state.method == method and len(state.feature) == self._feature_bytes:
                feature = self._unpack(state.feature)
            else:
                num_drafted = 0
                self._account.lost_draft(sequence.request_id, f"it is {state.method}'s, not {method}'s")
        self._drafters[method].begin(sequence, num_drafted, feature)

    def state(self, request_id: str) -> DraftState:
        request = self._requests.get(request_id)
        if request is None or request.method is None:
            return REBUILD
        drafter = self._drafters[request.method]
        feature, num_drafted = drafter.feature(request_id), drafter.num_drafted(request_id)
        if feature is None and num_drafted == 0:
            return REBUILD
        return DraftState(
            kind="carried",
            method=request.method,
            num_tokens=num_drafted,
            feature=b"" if feature is None else feature.cpu().view(torch.uint8).numpy().tobytes(),
        )

    def _unpack(self, feature: bytes) -> Tensor | None:
        if not feature:
            return None
        values = torch.frombuffer(bytearray(feature), dtype=self._loaded.dtype)
        return values.to(self._loaded.device)

    def plan(self, decoding: Many[Sequence], num_to_come: int) -> None:
        self._rests = False
        if not self._drafters or not (self._num_speculating or num_to_come):
            return
        is_due = self._control.is_due(len(decoding), num_to_come)
        if not is_due and self._control.is_idle:
            self._rests = self._control.rests
            return
        requests = [self._request(sequence) for sequence in decoding]
        if is_due:
            for sequence, request in zip(decoding, requests, strict=True):
                if request.method is not None:
                    request.backlog = _backlog(sequence, self._drafters[request.method])
            self._control.choose(decoding, requests)
        for sequence, request in zip(decoding, requests, strict=True):
            sequence.draft_room = request.chosen

    def propose(self, step: ScheduledStep) -> None:
        self._takes_part = self._num_speculating > 0
        if not self._takes_part or self._rests:
            return
        by_method: dict[Method, list[Sequence]] = {}
        for sequence in step.sequences:
            if sequence.draft_room > 0 and sequence.is_decoding:
                method = self._request(sequence).method
                assert method is not None
                by_method.setdefault(method, []).append(sequence)
        self._control.begin_drafting()
        for method, sequences in by_method.items():
            for sequence in sequences:
                if missed := self._unread.of(sequence):
                    self._drafters[method].observe(missed)
            sequences.sort(key=_draft_room, reverse=True)
            rooms = [sequence.draft_room for sequence in sequences]
            drafts = self._drafters[method].propose(sequences, rooms)
            for sequence, draft in zip(sequences, drafts, strict=True):
                sequence.draft = draft
            self._control.drafted(method, sequences, [self._request(sequence) for sequence in sequences])

    def verify(self, sequences: Many[Sequence], logits: Tensor) -> list[Verdict]:
        return verify(self._options.verification, sequences, logits, self._sampler)

    def wants_hidden(self, step: ScheduledStep) -> bool:
        """Not where no draft pays, since they are not for free: neither of prompts, nor, where drafts hardly
        ever pay, of steps that no draft can follow.
        """
        if not self.hidden_layers or not self._takes_part:
            return False
        if self._control.drafts:
            return True
        if step.only_decodes:
            return not self._control.is_idle or self._control.may_draft_next
        return self._control.reads_prompts or any(
            self._request(sequence).fixed_tokens for sequence in step.sequences
        )

    def observe(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        if not self._takes_part:
            return
        self._control.learn(step)
        if not self._num_speculating:
            self._control.take_lessons()
        if not self._control.drafts:
            if step.only_decodes and hidden is None:
                return  # no drafter could learn from it
            if step.only_decodes and hidden is not None and self._control.is_idle:
                self._unread.keep(step, hidden)
                return  # no draft pays, nor then does what drafters make of hidden states
        self._unread.clear()
        computed: dict[Method, list[Computed]] = {}
        row = 0
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            first, row = row, row + outcome.num_rows
            if sequence.table is None:
                continue  # it has ended
            method = self._request(sequence).method
            if method is not None:
                computed.setdefault(method, []).append(Computed.of(sequence, outcome, hidden, first))
        for method, found in computed.items():
            drafter = self._drafters[method]
            if hidden is None and drafter.hidden_layers:
                continue
            drafter.observe(found)
            if drafter.segment is not None:
                for each in found:
                    assert each.sequence.table is not None
                    self._blocks.mark_drafted(
                        each.sequence.table, drafter.num_drafted(each.sequence.request_id)
                    )

    def forget(self, sequence: Sequence) -> None:
        request = self._requests.pop(sequence.request_id, None)
        if request is not None and request.method is not None:
            self._control.ended(sequence)
            self._num_speculating -= 1
            if self._num_speculating == 0:
                self._control.take_lessons()
            self._drafters[request.method].forget(sequence.request_id)

    def counters(self) -> dict[str, float]:
        return self._account.counters()

    def report(self) -> SpeculationState:
        most = 0
        if self._deployed is not None:
            fixed = self._deployed.fixed_tokens
            most = draft_shape(self._deployed.method, self._options).max_tokens if fixed is None else fixed
        return self._control.report(most)

    def _request(self, sequence: Sequence) -> Request:
        request = self._requests.get(sequence.request_id)
        if request is None:
            request = self._requests[sequence.request_id] = self._new_request(sequence)
            self._num_speculating += request.method is not None
        return request

    def _new_request(self, sequence: Sequence) -> Request:
        asked = sequence.request.speculation or RequestSpeculation()
        method = asked.method or (self._deployed.method if self._deployed is not None else None)
        fixed = asked.num_speculative_tokens
        if fixed is None:
            fixed = self._options.fixed_tokens
        if method is None or not asked.enabled or fixed == 0:
            return self._control.new_request(sequence, None, 0)
        if method not in self._drafters:
            drafter = build_drafter(method, self._options, self._config, self._loaded)
            drafter.attach(self._loaded, self._pool)
            self._drafters[method] = drafter
            self._control.add_method(method, drafter, draft_shape(method, self._options), None)
        if method == "lookahead" and fixed is not None:
            fixed = self._options.lookahead_rows  # it takes all of them or none
        return self._control.new_request(sequence, method, fixed)


def _draft_room(sequence: Sequence) -> int:
    return sequence.draft_room


def _backlog(sequence: Sequence, drafter: Drafter) -> int:
    """Tokens that the drafter has missed, but for the two that it may have to read after each draft."""
    if drafter.segment is None:
        return 0
    missed = max(len(sequence.token_ids) - drafter.num_drafted(sequence.request_id) - 2, 0)
    return min(missed, MOST_STEPS) if drafter.hidden_layers else missed
