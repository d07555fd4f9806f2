"""The speculation of one engine: it asks drafters for drafts, verifies them and keeps statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from costs.widths import TargetTime
from engine.devices.loaded_model import LoadedModel
from engine.kv.pool import KVPool
from engine.sampler import Sampler
from engine.step.draft import Draft, Outcome, Verdict, late_among
from engine.step.profiling import ProfilingRun
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from engine.step.speculation_interface import MakeRoom, Speculator
from protocol.config import ServeConfig
from protocol.handoff import REBUILD, DraftState
from protocol.speculation import CUSTOM, REMOTE, Source, SpeculationState, SpeculativeConfig
from speculation.account import Account, DraftTurn
from speculation.control.controller import DraftController
from speculation.control.estimator import (
    SpeculatingRequest,
    default_drafted,
    measure_reading,
    measure_target,
    most_drafted,
)
from speculation.drafter import MOST_STEPS, ComputedRows, Drafter, UnreadSteps
from speculation.remote import RemoteDrafter
from speculation.sources import DraftSources, GrammarDrafts, problem
from speculation.verification.verify import prepare, verify


class BatchSpeculator(Speculator):
    """Drafts by the methods that requests ask for, or the deployment, and verifies."""

    def __init__(self, config: ServeConfig, loaded: LoadedModel, remote: RemoteDrafter | None = None) -> None:
        """Load the drafters; `remote` has the drafts of draft workers, if there are any. Raise `ConfigError`
        for a draft that does not fit the model.
        """
        self._config = config
        self._loaded = loaded
        self._deployed = config.speculative_config
        self._options = self._deployed or SpeculativeConfig(method="ngram")
        self._requests: dict[str, SpeculatingRequest] = {}
        self._num_speculating = 0
        """The number of requests with a method. Without any, the speculator skips steps."""
        self._unread = UnreadSteps()
        self._has_speculating_requests = False
        """Whether any request speculated when the current step was prepared."""
        self._rooms: dict[SequenceState, tuple[int, SpeculatingRequest]] = {}
        """The sequences that draft in the current step, the tokens that they have room for, and their
        requests, which may be forgotten before the step is learned from.
        """
        self._drafted_at = 0.0
        self._late_turns: list[DraftTurn] = []
        """Turns of the current step whose duration is known with the verdicts."""
        self._account = Account()
        self._controller = DraftController(config.max_num_seqs, most_drafted(self._options))
        self._remote = remote
        estimator = self._controller.estimator
        self._sources = DraftSources(config, loaded, remote, self._account, estimator)
        self._drafters = self._sources.drafters
        if (own := self._sources.own) is not None:
            self.kv_group, self.state_layout = own.kv_group, own.state_layout
            self.hidden_layers = own.hidden_layers
        self.most_drafted = default_drafted(self._options)
        num_features = len(self.hidden_layers) + (own.carried_features if own is not None else 0)
        self._feature_bytes = num_features * loaded.hidden_size * loaded.dtype.itemsize

    def attach(self, loaded: LoadedModel, pool: KVPool, sampler: Sampler) -> None:
        self._sampler = sampler
        assert sampler.grammars is not None
        self._grammar_drafts = GrammarDrafts(sampler.grammars, self._account)
        prepare(self._options.verification, sampler, loaded.dtype)
        self._sources.attach(pool)

    def warm_up(self, profiling: ProfilingRun, *, is_exact: bool) -> None:
        if self._options.deterministic and not is_exact:
            self.off_because = "drafts could change tokens here; a request may ask for them"
            self._sources.drafts_unasked = False
        estimator = self._controller.estimator
        measures = self._options.fixed_tokens is None  # otherwise there is nothing to choose
        if self._drafters and measures:
            max_sequences = self._config.max_num_seqs
            estimator.target = TargetTime(measure_target(profiling, self.verify, max_sequences))
        for method, drafter in self._drafters.items():
            drafter.warm_up()
            self._sources.register_method(method)
            if measures and drafter.kv_group is not None and drafter.hidden_layers:
                estimator.methods[method].time.per_read = measure_reading(profiling, drafter)

    def begin(self, sequence: SequenceState, state: DraftState = REBUILD) -> None:
        """Begin a sequence with blocks: at first, after a preemption, or by a hand-off with this `state`."""
        request = self._request(sequence)
        method = request.method
        if method is None:
            return
        self._controller.join(request, is_read=state.kind == "carried")
        num_drafted = sequence.held.num_drafted
        feature = None
        if state.kind == "carried":
            if state.method == method and len(state.feature) in (0, self._feature_bytes):
                feature = self._unpack(state.feature) if sequence.num_uncomputed == 1 else None
                if num_drafted >= (sequence.num_cached or 0):
                    num_drafted = max(num_drafted, state.num_tokens)
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

    def prepare(self, step: ScheduledStep, num_active: int, make_room: MakeRoom) -> bool:
        for sequence in step.admitted:
            self.begin(sequence)
        self._has_speculating_requests = self._num_speculating > 0
        self._rooms = {}
        self._grammar_drafts.forced.clear()
        decoding = [sequence for sequence in step.sequences if sequence.is_decoding]
        self._draft_forced(step, decoding, make_room)
        if not self._has_speculating_requests:
            return False
        is_due = self._controller.begin_step(len(decoding), num_active - len(decoding))
        if is_due:
            self._plan(decoding)
        if self._controller.drafts and decoding:
            self._draft(step, decoding, make_room)
        return bool(self.hidden_layers) and self._wants_hidden(step)

    def may_go_ahead(self, step: ScheduledStep, num_active: int) -> bool:
        """Return whether the step may go ahead. A sequence with a grammar is in no such step."""
        if self._num_speculating == 0:
            return True
        num_decoding = len(step.sequences)
        to_come = num_active - num_decoding
        return self._controller.may_go_ahead(num_decoding, to_come, bool(self.hidden_layers))

    def went_ahead(self, step: ScheduledStep, num_active: int) -> None:
        num_decoding = len(step.sequences)
        self._has_speculating_requests = self._num_speculating > 0 and num_decoding > 0
        self._rooms = {}
        self._grammar_drafts.forced.clear()
        if self._has_speculating_requests:
            self._controller.went_ahead(num_decoding, num_active - num_decoding)

    def _draft_forced(
        self, step: ScheduledStep, decoding: Sequence[SequenceState], make_room: MakeRoom
    ) -> None:
        may_draft = self._sources.may_draft_here
        constrained = [each for each in decoding if each.params.grammar is not None]
        if drafting := [each for each in constrained if may_draft(each, self._request(each).method)]:
            self._grammar_drafts.draft(step, drafting, make_room)

    def _plan(self, decoding: Sequence[SequenceState]) -> None:
        requests = [self._request(sequence) for sequence in decoding]
        for sequence, request in zip(decoding, requests, strict=True):
            if request.method is not None:
                request.place = len(sequence.token_ids)
                request.unread = _unread(sequence, self._drafters[request.method])
        self._controller.plan(requests)
        for sequence, request in zip(decoding, requests, strict=True):
            if request.method is not None:
                self._account.chose(request.method, request.granted)
            if request.method == REMOTE and self._remote is not None:
                self._remote.grant(sequence.request_id, request.granted)

    def _draft(self, step: ScheduledStep, decoding: Sequence[SequenceState], make_room: MakeRoom) -> None:
        by_method: dict[Source, list[SequenceState]] = {}
        for sequence in decoding:
            request = self._request(sequence)
            if sequence in self._grammar_drafts.forced:
                continue
            if request.granted and (room := make_room(step, sequence, request.granted)):
                assert request.method is not None
                self._rooms[sequence] = room, request
                by_method.setdefault(request.method, []).append(sequence)
        for method, sequences in by_method.items():
            sequences.sort(key=lambda sequence: self._rooms[sequence][0], reverse=True)
            rooms = [self._rooms[sequence][0] for sequence in sequences]
            requests = [self._rooms[sequence][1] for sequence in sequences]
            turn = DraftTurn(method, requests, rooms, self._loaded.device)
            drafter = self._drafters[method]
            for sequence in sequences:
                if missed := self._unread.of(sequence):
                    drafter.observe(missed)
            drafts = drafter.propose(sequences, rooms)
            if method == CUSTOM:
                drafts = self._runnable(drafts, rooms)
            for sequence, draft in zip(sequences, drafts, strict=True):
                sequence.draft = draft
                if draft is not None and sequence.params.grammar is not None:
                    sequence.draft = self._grammar_drafts.constrain(sequence, draft, method)
            turn.end(is_late=late_among(drafts) is not None)
            if turn.is_late:
                self._late_turns.append(turn)
            else:
                self._learn_turn(turn)

    def _learn_turn(self, turn: DraftTurn) -> None:
        seconds = turn.seconds
        self._drafted_at = max(self._drafted_at, turn.began + seconds)
        self._account.drafted(turn.method, seconds)
        self._controller.estimator.drafted(turn.method, turn.requests, turn.rooms, seconds)

    def _runnable(self, drafts: Sequence[Draft | None], rooms: Sequence[int]) -> list[Draft | None]:
        """Return the drafts that the step can run; any other would end the step for all requests."""
        runnable: list[Draft | None] = []
        for draft, room in zip(drafts, rooms, strict=True):
            why = "" if draft is None else problem(draft, room, self._loaded.vocab_size)
            if why:
                self._account.refused_draft(why)
            runnable.append(None if why else draft)
        return runnable

    def verify(self, sequences: Sequence[SequenceState], logits: Tensor) -> list[Verdict]:
        verdicts = verify(self._options.verification, sequences, logits, self._sampler)
        for turn in self._late_turns:
            self._learn_turn(turn)
        self._late_turns.clear()
        return verdicts

    def _wants_hidden(self, step: ScheduledStep) -> bool:
        """Return whether to capture hidden states. It takes time, so only if drafts may read them."""
        if self._rooms or (self._grammar_drafts.forced and self._controller.drafts):
            return True
        if step.only_decodes:
            return self._controller.reads_steps
        for sequence in step.sequences:
            request = self._request(sequence)
            if request.method is not None and (request.fixed_tokens or self._reads_prompts(request, step)):
                return True
        return False

    def _reads_prompts(self, request: SpeculatingRequest, step: ScheduledStep) -> bool:
        assert request.method is not None
        if not self._controller.estimator.methods[request.method].reads_prompts:
            return False
        return self._controller.reads_prompts(request.method, sum(step.num_tokens))

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        if self._grammar_drafts.forced:
            self._grammar_drafts.count(step)
        if not self._has_speculating_requests:
            return
        self._learn(step)
        # A sequence that is handed over takes the drafter's state with it, so the drafter must read the step.
        hands_over = any(sequence.prefill_only for sequence in step.sequences)
        if not self._rooms and step.only_decodes and not hands_over:
            if hidden is None:
                return  # no drafter could learn from it
            if not self._controller.drafts:
                self._unread.keep(step, hidden)
                return  # no request drafts now
        self._unread.clear()
        computed: dict[Source, list[ComputedRows]] = {}
        row = 0
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            first, row = row, row + outcome.num_rows
            if sequence.sequence_blocks is None:
                continue  # it has ended
            request = self._request(sequence)
            if request.method is not None:
                computed.setdefault(request.method, []).append(
                    ComputedRows.of(sequence, outcome, hidden, first)
                )
                request.is_blind |= hidden is None
        for method, found in computed.items():
            drafter = self._drafters[method]
            if hidden is None and drafter.hidden_layers:
                continue
            drafter.observe(found)
            if drafter.kv_group is not None:
                for each in found:
                    each.sequence.held.mark_drafted(drafter.num_drafted(each.sequence.request_id))

    def _learn(self, step: ScheduledStep) -> None:
        if not step.only_decodes or self._grammar_drafts.forced:
            self._controller.estimator.disturb()
        if not self._rooms:
            self._account.stepped(0.0, verifies=False)
            return
        verifies = False
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if drafting := self._rooms.get(sequence):
                verifies |= outcome.draft is not None
                self._learn_draft(sequence, *drafting, outcome)
        self._account.stepped(time.perf_counter() - self._drafted_at, verifies)

    def _learn_draft(
        self, sequence: SequenceState, room: int, request: SpeculatingRequest, outcome: Outcome
    ) -> None:
        draft, verdict = outcome.draft, outcome.verdict
        method, estimator = request.method, self._controller.estimator
        assert method is not None
        if draft is None or not draft.token_ids or verdict is None or verdict.failed:
            estimator.verified(request, room, 0)
            return
        # The acceptance beyond a chain's end is unknown. A tree is all that its method has, so nothing is
        # accepted beyond its end. Probes alone accept nothing.
        is_whole = estimator.methods[method].shape.whole
        depth = self._options.max_speculative_tokens if is_whole else draft.depth
        num_agreed = len(verdict.accepted)
        estimator.verified(request, room, len(draft.token_ids))
        request.acceptance.observe(depth, num_agreed, len(sequence.token_ids))
        self._account.verified(method, draft.num_nodes, outcome.num_accepted)
        if not draft.is_blind:
            self._account.observed_first(method, request.origin, num_agreed > 0)

    def forget(self, sequence: SequenceState) -> None:
        request = self._requests.get(sequence.request_id)
        if request is None:
            return
        self._end(sequence, request)
        if request.method is not None and sequence.output_token_ids and not sequence.prefill_only:
            num_read = len(sequence.prompt_token_ids) - (sequence.num_cached or 0)
            num_read = 0 if sequence.handed_over else num_read
            self._controller.estimator.ended(num_read, len(sequence.output_token_ids))

    def _end(self, sequence: SequenceState, request: SpeculatingRequest) -> None:
        """Stop drafting for the sequence."""
        del self._requests[sequence.request_id]
        if request.method is not None:
            self._num_speculating -= 1
            if self._num_speculating == 0:
                self._controller.end_window()
            self._drafters[request.method].forget(sequence.request_id)

    def counters(self) -> dict[str, float]:
        return self._account.counters()

    def report(self) -> SpeculationState:
        most = self.most_drafted if self._deployed is not None else 0
        answers = self._remote.answers.copy() if self._remote is not None else {}
        return msgspec.structs.replace(self._controller.estimator.report(most), draft_answers=answers)

    def _request(self, sequence: SequenceState) -> SpeculatingRequest:
        request = self._requests.get(sequence.request_id)
        if request is None:
            request = self._requests[sequence.request_id] = self._sources.new_request(sequence)
            self._num_speculating += request.method is not None
        return request

    def replan(self, sequence: SequenceState) -> None:
        before = self._requests.get(sequence.request_id)
        if before is None:
            return  # not begun yet
        source = self._sources.source(sequence)
        if before.method is None and (source is None or self._sources.is_unable(source)):
            return
        if source == before.method and self._sources.keeps_its_worker(source, sequence):
            self._sources.limit(before, sequence)
            self._controller.join(before, is_read=True)
            return
        self._end(sequence, before)
        if sequence.sequence_blocks is not None:
            self.begin(sequence)


def _unread(sequence: SequenceState, drafter: Drafter) -> int:
    """Return how many tokens the drafter must read first, except two that any draft can read."""
    if drafter.kv_group is None:
        return 0
    missed = max(len(sequence.token_ids) - drafter.num_drafted(sequence.request_id) - 2, 0)
    return min(missed, MOST_STEPS) if drafter.hidden_layers else missed
