"""Between speculator and controller: tells it what steps took and brought, and carries its choices out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

from engine.scheduler import ScheduledStep
from engine.sequence import Sequence, Stage
from engine.speculator import Outcome
from protocol.speculation import Method, SpeculationState
from speculation.account import Account
from speculation.control.acceptance import Acceptance, MethodAcceptance
from speculation.control.clock import StepClock
from speculation.control.collapse import CollapseWatch, Origin
from speculation.control.controller import Controller, MethodControl
from speculation.control.plan import Request, Shape
from speculation.control.step_time import UNMEASURED, DraftTime, DraftTimes, TargetTime, TargetTimes
from speculation.drafter import Drafter

_LEAST_GAIN = 0.03
"""What drafts with weights of their own must bring: what they are expected to is not exact."""
_MAX_ROWS = 8192
"""The step-time model knows no larger steps."""
_MOST_LESSONS = 128
"""That are put off, lest a step have to wait for very many."""


class Control:
    """Called at the same points of each step as the speculator; `report` from any thread."""

    def __init__(self, account: Account, max_sequences: int, max_depth: int, max_tokens: int) -> None:
        """`max_depth` is how deep a draft may get, `max_tokens` how many tokens it may have."""
        self._account = account
        self._max_depth = max_depth
        self._max_rows = min(max_sequences * (1 + max_tokens), _MAX_ROWS)
        self._controller = Controller(TargetTime(UNMEASURED, self._max_rows), max_sequences)
        self._clock = StepClock()
        self._watch = CollapseWatch()
        self._drafting: dict[Sequence, Request] = {}
        """The requests that draft in the step under way."""
        self._num_sequences = 0
        """Of the latest step that was learned from."""
        self._lessons: list[Callable[[], None]] = []
        """Learned all at once, when their code and data are in the caches: before the next choice, or earlier
        if they are many."""

    def set_target_times(self, times: TargetTimes) -> None:
        self._controller.target = TargetTime(times, self._max_rows)

    def add_method(self, method: Method, drafter: Drafter, shape: Shape, times: DraftTimes | None) -> None:
        """`times`: what drafting was measured to take, if it was."""
        reads_prompts = bool(drafter.hidden_layers)
        self._controller.methods[method] = MethodControl(
            shape,
            MethodAcceptance(self._max_depth),
            DraftTime(times),
            least_gain=_LEAST_GAIN if drafter.segment is not None or reads_prompts else 0.0,
            reads_prompts=reads_prompts,
        )

    def new_request(self, sequence: Sequence, method: Method | None, fixed_tokens: int | None) -> Request:
        """`method` None: it does not speculate."""
        known = self._controller.methods[method].acceptance if method is not None else MethodAcceptance(0)
        request = Request(method, fixed_tokens, Acceptance(known), _origin(sequence))
        self._controller.expect(request)
        return request

    def ended(self, sequence: Sequence) -> None:
        """Its request is over."""
        if sequence.output_token_ids and not sequence.prefill_only:
            num_found = len(sequence.prompt_token_ids) if sequence.handed_over else sequence.num_cached or 0
            num_read = len(sequence.prompt_token_ids) - num_found
            self._controller.lengths.observe(num_read, len(sequence.output_token_ids))

    def is_due(self, num_sequences: int, num_to_come: int) -> bool:
        """A step begins in which so many sequences will decode, with more to come. Whether to `choose` for
        it; otherwise what was chosen stands.
        """
        surroundings = self._clock.begin()
        if surroundings is not None and self._controller.is_steady:
            observe = self._controller.surroundings.observe
            self._lessons.append(partial(observe, self._num_sequences, self.drafts, surroundings))
        return self._controller.is_due(num_sequences, num_to_come)

    def choose(self, decoding: Many[Sequence], requests: Many[Request]) -> None:
        self.take_lessons()
        for sequence, request in zip(decoding, requests, strict=True):
            request.place = len(sequence.token_ids)
        context = sum([request.place for request in requests]) / len(requests)
        self._controller.choose(requests, context)
        for request in requests:
            if request.method is not None:
                self._account.chose(request.method, request.chosen)

    @property
    def is_idle(self) -> bool:
        """As `Controller.is_idle`."""
        return self._controller.is_idle

    @property
    def reads_prompts(self) -> bool:
        """As `Controller.reads_prompts`."""
        return self._controller.reads_prompts

    @property
    def rests(self) -> bool:
        """As `Controller.rests`."""
        return self._controller.rests

    @property
    def may_draft_next(self) -> bool:
        """As `Controller.may_draft_next`."""
        return self._controller.may_draft_next

    def begin_drafting(self) -> None:
        self._drafting.clear()
        self._clock.mark()

    @property
    def drafts(self) -> bool:
        """Whether any request was to draft in the step under way."""
        return bool(self._drafting)

    def drafted(self, method: Method, sequences: Many[Sequence], requests: Many[Request]) -> None:
        """The drafts of all sequences of this method have just been made."""
        seconds = self._clock.lap()
        self._account.drafted(method, seconds)
        self._drafting.update(zip(sequences, requests, strict=True))
        control = self._controller.methods[method]
        rooms = [sequence.draft_room for sequence in sequences]
        num_read = sum([request.backlog for request in requests])
        levels = 1 if control.shape.whole else max(rooms)
        self._lessons.append(partial(control.time.observe, levels, sum(rooms), num_read, seconds))
        for request in requests:
            request.backlog = 0

    def learn(self, step: ScheduledStep) -> None:
        """The step has its outcomes."""
        if not self.drafts and not self._controller.is_watched:
            self._account.stepped(0.0, verifies=False)
            return
        seconds = self._clock.lap()
        outcomes = step.outcomes
        verifies = self.drafts and any(outcome.draft is not None for outcome in outcomes)
        self._account.stepped(seconds, verifies)
        only_decodes = step.only_decodes
        followed = any(sequence.stage is Stage.RUNNING for sequence in step.sequences)
        self._clock.end(followed and only_decodes)
        self._num_sequences = count = len(outcomes)
        if only_decodes and self._controller.is_steady:
            rows = sum([outcome.num_rows for outcome in outcomes])
            context = sum([outcome.start for outcome in outcomes]) / count
            self._lessons.append(partial(self._controller.observe_step, count, rows, context, seconds))
        if self.drafts:
            for sequence, outcome in zip(step.sequences, outcomes, strict=True):
                request = self._drafting.get(sequence)
                if request is not None:
                    room, place = sequence.draft_room, len(sequence.token_ids)
                    self._lessons.append(partial(self._learn_acceptance, request, outcome, room, place))
        if len(self._lessons) >= _MOST_LESSONS:
            self.take_lessons()

    def take_lessons(self) -> None:
        """Learn what was put off. Each choice begins so; where none is to come, this is to be called."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            lesson()

    def _learn_acceptance(self, request: Request, outcome: Outcome, room: int, place: int) -> None:
        """Of a request with `room` for drafted tokens, which is now `place` tokens long."""
        draft, verdict, method = outcome.draft, outcome.verdict, request.method
        assert method is not None
        num_drafted = len(draft.token_ids) if draft is not None else 0
        request.acceptance.observe_share(room, num_drafted)
        if draft is None or verdict is None or verdict.failed:
            return
        num_agreed = len(verdict.accepted)
        # What is behind a chain's end is not known, but behind those of a tree, which is all that its method
        # has, there is nothing. Of probes alone nothing is accepted.
        is_tree = self._controller.methods[method].shape.whole
        depth = self._max_depth if is_tree else draft.depth
        request.acceptance.observe(depth, num_agreed, place, is_blind=draft.is_blind)
        self._account.verified(method, draft.num_nodes, outcome.num_accepted)
        if not draft.is_blind and self._watch.observe(method, request.origin, num_agreed > 0):
            self._account.collapsed(method, request.origin)

    def report(self, max_tokens: int) -> SpeculationState:
        """`max_tokens`: the most that a request drafts by the deployment's configuration."""
        return self._controller.report(max_tokens)


def _origin(sequence: Sequence) -> Origin:
    if sequence.handed_over:
        return "handed_over"
    return "prefix_hit" if sequence.num_cached else "computed"
