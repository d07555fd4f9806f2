"""Chooses for each step how many tokens its requests draft; a batch in which none pays drafts nothing.

Choices are made of what was committed before, and never of the drafted tokens that they admit: whether a
token is verified must not depend on the token.

What is not done is not learned about. So a small part of the time goes to what seems to lose: a request that
drafts nothing drafts once, or a whole step does without drafts that seem to pay, or with those that don't.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from protocol.speculation import Method, MethodState, SpeculationState, StepTimeState
from speculation.control.acceptance import Acceptance, MethodAcceptance
from speculation.control.lengths import Lengths
from speculation.control.plan import Load, Plan, Planner, Request, Shape, chances, probe
from speculation.control.step_time import DraftTime, SurroundingTime, TargetTime

DRAFT_TRIAL_SHARE, PLAIN_TRIAL_SHARE = 0.0015, 0.0075
"""The part of the time that trials may lose, as far as is known: a request's or a step's drafts where they
seem to lose, and steps without drafts where those seem to pay. The latter get more: a wrong belief makes them
look dear, and the drafts that it leads to lose time in each step until trials have mended it.
"""
_TRIAL_STEPS = 6
_FREE_TRIAL_EVERY, _STEP_TRIAL_EVERY = 2, 12
"""Choices. Where two ways are equally fast a trial costs nothing, but one is as good as many."""
FIRST_DRAFTS, _FIRST_OF_REQUEST = 32, 8
"""Of a method, by requests that choose for themselves, and how many one of them makes. They are made whatever
they seem to lose, by a few requests at a time and so deep: without them nothing is known but a guess."""
_FIRST_DRAFTERS, _FIRST_DEPTH = 4, 4
_FIRST_APART = 12
"""Tokens from one of these drafts to the request's next: how a text begins tells little of how it goes on."""
_AGAIN_EVERY = 24
"""Requests that hardly ever draft, after which one makes as many such drafts again: the text of those before
may have been hard, and little is learned of requests whose prompts were not read for drafting."""
_NEWS_SHARE, _FIRST_SAVED, _HARDLY_ANY = 0.2, 0.25, 0.025
"""What one choice counts for in the share of the time that drafts save at a load, what that is taken to be at
first, and below which share they are taken not to pay there."""
_FREE_TRIALS = 8
"""Steps without drafts, for each number of sequences, that are tried whatever they seem to lose."""
_ENOUGH = 64
"""Steps after which those of their size are known."""
_CHOICE_STANDS, _PLAIN_STANDS, _IDLE_STANDS = 8, 16, 64
"""Steps for which a choice stands as long as nobody comes or goes, since choosing takes time too; the second
if nothing is drafted, the third where hardly ever anything is, or nobody leaves a choice."""
_SETTLED = 3
"""Steps after a choice from which on they take as long as others of their kind."""


@dataclass(eq=False)
class MethodControl:
    """What is known of a method: what it drafts, how that is accepted, and what it costs."""

    shape: Shape
    acceptance: MethodAcceptance
    time: DraftTime
    least_gain: float = 0.0
    """By which share of the plain rate drafts must be ahead."""
    reads_prompts: bool = False
    """Whether every prompt must be read for drafts to be good, and not first when one is wanted."""
    num_first: int = 0
    """Of the first drafts, so far."""
    num_requests: int = 0
    """In the latest step; `num_tokens` is the sum of what they were to draft."""
    num_tokens: int = 0

    def report(self, method: Method) -> MethodState:
        times = self.time.times
        return MethodState(
            method=method,
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            acceptance=self.acceptance.rates(),
            start_s=times.start,
            level_s=times.per_level,
            token_s=times.per_token,
        )


class Savings:
    """Seconds that trials may lose: saved from choice to choice, at most what passes between two."""

    def __init__(self, share: float) -> None:
        """Of the time that passes."""
        self._share = share
        self._seconds = 0.0

    def save(self, seconds: float) -> None:
        """So much time has passed."""
        self._seconds = min(self._seconds + self._share * seconds, seconds)

    def spend(self, seconds: float) -> bool:
        """Whether that much was there; if so it is gone."""
        if seconds > self._seconds:
            return False
        self.charge(seconds)
        return True

    def charge(self, seconds: float) -> None:
        self._seconds -= max(seconds, 0.0)


class Controller:
    """For the engine's thread. Deterministic, given what it is told."""

    def __init__(self, target: TargetTime, max_sequences: int) -> None:
        self.target = target
        self.surroundings = SurroundingTime(max_sequences)
        self.methods: dict[Method, MethodControl] = {}
        self.lengths = Lengths()
        self._request_trials = Savings(DRAFT_TRIAL_SHARE)
        self._draft_trials, self._plain_trials = Savings(DRAFT_TRIAL_SHARE), Savings(PLAIN_TRIAL_SHARE)
        self._num_choices = 0
        self._load = 0, 0
        """Requests that decode, and that will soon."""
        self._since = 0
        """Steps since the latest choice, and for how many it stands."""
        self._stands = 0
        self._trial: Savings | None = None
        self._is_known = False
        self._drafts = False
        """Whether any request does by the latest choice."""
        self._num_passed_over = 0
        self._saved: dict[int, float] = {}
        """The share of the time that drafts saved of late, less what prompts take to be read for them, by the
        number of bits of the load.
        """

    def is_due(self, num_requests: int, num_to_come: int = 0) -> bool:
        """Whether to `choose` for the coming step; otherwise the latest choices stand. To be asked once for
        each step.

        `num_to_come` requests more will decode soon: choices are made as if they did already, since what a
        drafter reads of a prompt is lost where drafting then doesn't pay.
        """
        self._since += 1
        is_due = self._since >= self._stands or (num_requests, num_to_come) != self._load
        self._load = num_requests, num_to_come
        return is_due and num_requests > 0

    @property
    def is_steady(self) -> bool:
        """Whether the latest step's time tells of others: a choice leaves the caches to something else, as
        does a change between drafting and not. Where little is known yet, all but the first tell something.
        """
        return self._since >= (_SETTLED if self._is_known else 1)

    @property
    def is_watched(self) -> bool:
        """Whether a step without drafts is to be learned from: of those that are known one for each choice,
        and the trials.
        """
        return self.is_steady and not (self._is_known and self._since > _SETTLED)

    @property
    def rests(self) -> bool:
        """Whether the step is one of many without drafts, so that there is nothing to learn from it."""
        return not self._drafts and self._is_known and self._trial is None and self._since > _SETTLED

    @property
    def is_idle(self) -> bool:
        """Whether none of the requests that decode drafts by the latest choice, or, before any does, those to
        come are so many that drafts hardly ever pay.
        """
        if self._load[0] == 0:
            return self._hardly_pays
        return not self._drafts

    @property
    def reads_prompts(self) -> bool:
        """Whether prompts are to be read for drafts, be it that no other request drafts just now: without
        that, drafts are poor.
        """
        return not self._hardly_pays

    @property
    def may_draft_next(self) -> bool:
        """Whether the step after this one may draft although this one does not: always, but where drafts
        hardly ever pay only if it begins with a choice.
        """
        return not self._hardly_pays or self._since + 1 >= self._stands

    @property
    def _hardly_pays(self) -> bool:
        """At the present load, as far as is known."""
        if any(control.num_first < FIRST_DRAFTS for control in self.methods.values()):
            return False
        return self._saved.get(sum(self._load).bit_length(), _FIRST_SAVED) < _HARDLY_ANY

    def expect(self, request: Request) -> None:
        """A request has come, for which no choice was made yet."""
        if request.method is None:
            return
        self._stands = 0
        if request.fixed_tokens is None and self._hardly_pays:
            self._num_passed_over += 1
            if self._num_passed_over == _AGAIN_EVERY:
                self._num_passed_over = 0
                self.methods[request.method].num_first = FIRST_DRAFTS - _FIRST_OF_REQUEST

    def choose(self, requests: Many[Request], context: float) -> None:
        """Set `chosen` of all the requests that will decode in the coming step, whose mean length is
        `context` tokens.
        """
        self._num_choices += 1
        self._stands = _CHOICE_STANDS
        self._trial = None
        groups: dict[Method, list[Request]] = {}
        for request in requests:
            request.chosen = request.fixed_tokens or 0
            if request.method is not None:
                request.acceptance.grow(request.place)
                groups.setdefault(request.method, []).append(request)
        if any(request.fixed_tokens is None for request in requests):
            self._decide(groups, len(requests) + self._load[1], context)
        else:
            self._stands = _IDLE_STANDS
        for method, control in self.methods.items():
            group = groups.get(method, [])
            control.num_requests = len(group)
            control.num_tokens = sum([request.chosen for request in group])
        self._drafts = any(request.chosen for request in requests)
        if self._trial is None and not self._drafts:
            self._stands = _IDLE_STANDS if self._hardly_pays else _PLAIN_STANDS
        self._since = 0

    def _decide(self, groups: dict[Method, list[Request]], num_sequences: int, context: float) -> None:
        most = 0
        for method, group in groups.items():
            widest = self.methods[method].shape.max_tokens
            most += sum([widest if request.fixed_tokens is None else request.chosen for request in group])
        target = self.target.curve(num_sequences, most, context)
        plain, drafting = (self.surroundings.seconds(num_sequences, drafts) for drafts in (False, True))
        load = Load(target, num_sequences, 0.0, plain, drafting=max(drafting - plain, 0.0))
        for method, group in groups.items():
            self._add_fixed(self.methods[method], [request for request in group if request.chosen], load)
        for method, group in groups.items():
            free = [request for request in group if request.fixed_tokens is None]
            control = self.methods[method]
            beginners = [request for request in free if _begins(request)]
            if beginners and control.num_first < FIRST_DRAFTS:
                self._begin(control, beginners[-_FIRST_DRAFTERS:])
            elif free:
                self._admit(control, free, num_sequences, load)
        seconds = load.total_seconds() * self._since
        for trials in (self._request_trials, self._draft_trials, self._plain_trials):
            trials.save(seconds)

    def _begin(self, control: MethodControl, group: list[Request]) -> None:
        """Let these requests make some of the method's first drafts."""
        for request in group:
            request.chosen = control.shape.max_tokens if control.shape.whole else _FIRST_DEPTH
            request.chosen = min(request.chosen, control.shape.max_tokens)
            request.last_drafted = self._num_choices
            request.num_first += 1
            request.next_first = request.place + _FIRST_APART
        control.num_first += len(group)
        self._stands = 1

    def _add_fixed(self, control: MethodControl, group: list[Request], load: Load) -> None:
        if not group:
            return
        times = control.time.times
        levels = 1 if control.shape.whole else max(request.chosen for request in group)
        load.seconds += load.drafting + times.start + times.per_level * levels
        load.drafting = 0.0
        for request in group:
            acceptance = request.acceptance
            width = acceptance.share * control.shape.width
            load.tokens += width * sum(chances(control.shape, acceptance)[: request.chosen])
            load.rows = min(load.rows + acceptance.share * request.chosen, load.most_rows)
            load.seconds += times.per_token * request.chosen

    def _admit(self, control: MethodControl, group: list[Request], num_sequences: int, load: Load) -> None:
        """Choose for the requests that draft as many tokens as pay."""
        shape, times = control.shape, control.time.times
        planner = Planner(shape, times, group, load)
        plan, plain = planner.best(), planner.plain
        pays = plan.rate > plain.rate * (1 + control.least_gain)
        size = num_sequences.bit_length()
        saved = self._saved.get(size, _FIRST_SAVED)
        if control.reads_prompts:
            news = self._saved_by_reading(control, len(group) + self._load[1], load)
            pays = pays and saved >= _HARDLY_ANY
        else:
            news = 1 - plain.rate / plan.rate if pays else 0.0
        self._saved[size] = saved + _NEWS_SHARE * (news - saved)
        is_new = pays and self.surroundings.num_seen(num_sequences, load.rows > 0) < _FREE_TRIALS
        if self._tries_the_other(control, planner, plan, pays=pays, is_new=is_new):
            pays = not pays
        if pays:
            planner.carry_out(plan)
        for request in group:
            if request.chosen:
                request.last_drafted = self._num_choices
        if pays or self._trial is not self._plain_trials:
            self._try_one(control, group, plan.levels if pays else 0, load)

    def _saved_by_reading(self, control: MethodControl, num_requests: int, load: Load) -> float:
        """The share of the time that drafts would save if the prompts of so many requests were read, less
        what that takes. What those that decode draft does not tell, as long as theirs were not.
        """
        typical = Request(None, None, Acceptance(control.acceptance))
        planner = Planner(control.shape, control.time.times, [typical] * num_requests, load)
        plan, plain = planner.best(), planner.plain
        reading = control.time.times.per_read * self.lengths.read_per_written * plain.rate
        return 1 - plain.rate / plan.rate - reading if plan.tokens else -reading

    def _tries_the_other(
        self, control: MethodControl, planner: Planner, plan: Plan, *, pays: bool, is_new: bool
    ) -> bool:
        """Whether some steps go without the plan that pays, or with the one that doesn't."""
        if self._num_choices % (_FREE_TRIAL_EVERY if is_new else _STEP_TRIAL_EVERY):
            return False
        plain = planner.plain
        if pays:
            trials, lost = self._plain_trials, plain.seconds - plain.tokens / plan.rate
        else:
            trials, lost = self._draft_trials, plan.seconds - plan.tokens / plain.rate
            lost = max(lost, control.least_gain * plan.seconds) + planner.unread_seconds(plan)
        if not is_new and not trials.spend(lost * _TRIAL_STEPS):
            return False
        self._trial, self._stands = trials, _TRIAL_STEPS
        return True

    def _try_one(self, control: MethodControl, group: list[Request], levels: int, load: Load) -> None:
        """Let that request draft which hasn't for the longest, once enough is saved for it."""
        request = min(group, key=_last_drafted)
        if request.chosen:
            return
        num_tokens, lost = probe(control.shape, control.time.times, request, levels, load)
        lost = max(lost, control.least_gain * load.total_seconds())
        if num_tokens and self._request_trials.spend(lost):
            request.chosen = num_tokens
            request.last_drafted = self._num_choices
            self._stands = 1

    def observe_step(self, num_sequences: int, rows: int, context: float, seconds: float) -> None:
        """The target's part of the latest step took so long."""
        if self._trial is not None:
            self._trial.charge(seconds - self.target.seconds(num_sequences, rows, context))
        self.target.observe(num_sequences, rows, context, seconds)
        self._is_known = self.target.num_seen(rows) >= _ENOUGH

    def report(self, max_tokens: int) -> SpeculationState:
        """May be called from any thread."""
        rows, seconds = self.target.knots()
        measured = self.target.times
        step_time = StepTimeState(
            rows=rows,
            seconds=seconds,
            sequence_s=measured.per_sequence,
            context_s=measured.per_context,
            attended_s=measured.per_attended,
            surroundings_s=self.surroundings.latest,
        )
        methods = [control.report(method) for method, control in self.methods.copy().items()]
        return SpeculationState(max_tokens=max_tokens, methods=methods, step_time=step_time)


def _begins(request: Request) -> bool:
    """Whether it may make one of the first drafts now."""
    return request.num_first < _FIRST_OF_REQUEST and request.place >= request.next_first


def _last_drafted(request: Request) -> int:
    return request.last_drafted
