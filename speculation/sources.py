"""The drafting methods by name, the choice of each request's drafter and number of draft tokens, a check of
custom drafters' drafts, and the drafts that grammars force.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine.devices.loaded_model import LoadedModel
from engine.kv.pool import KVPool
from engine.sampler import Grammars
from engine.step.draft import Draft
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from engine.step.speculation_interface import MakeRoom
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.fields import named
from protocol.speculation import (
    REMOTE,
    WEIGHTLESS,
    Method,
    RequestClass,
    RequestSpeculation,
    Source,
    SpeculativeConfig,
)
from speculation.account import Account
from speculation.control.estimator import Estimator, Origin, SpeculatingRequest, draft_shape
from speculation.drafter import Drafter
from speculation.remote import RemoteDrafter

_DRAFTERS: Mapping[Method, str] = MappingProxyType(
    {
        "draft_model": "speculation.draft_model:DraftModel",
        "ngram": "speculation.weightless.ngram:NgramDrafter",
        "suffix": "speculation.weightless.suffix:SuffixDrafter",
        "lookahead": "speculation.weightless.lookahead:LookaheadDrafter",
        "medusa": "speculation.medusa:MedusaDrafter",
        "eagle": "speculation.eagle:eagle_drafter",
        "mtp": "speculation.mtp_head:mtp_drafter",
        "dflash": "speculation.dflash:DFlashDrafter",
        "self_speculative": "speculation.self_speculative:SelfDrafter",
    }
)
"""Makers of the methods' drafters, imported when needed. `options.drafter` names that of `custom`."""

_FLAG = "--speculative-config: drafter"


def build_drafter(
    method: Method, options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel
) -> Drafter:
    """Load the method's weights, if it has any. Raise `ConfigError` that names the option."""
    name = _DRAFTERS.get(method) or options.drafter
    assert name is not None
    make = named(name, _FLAG)
    if not callable(make):
        raise ConfigError(f"{_FLAG}: {name} is neither a class nor a function")
    drafter = make(options, config, loaded)
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"{_FLAG}: {name} makes a {type(drafter).__name__}, not a speculation.drafter.Drafter"
        )
    return drafter


def problem(draft: Draft, room: int, vocab_size: int) -> str:
    """Return why a draft for `room` tokens cannot be run; "" if it can."""
    tokens, parents = draft.token_ids, draft.parents
    if not 0 < len(tokens) <= room:
        return f"it has {len(tokens)} tokens, where 1 to {room} were asked for"
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"the token {outside} is not among the model's {vocab_size}"
    if parents is None:
        return ""
    if len(parents) != draft.num_nodes:
        return f"it has {draft.num_nodes} nodes and {len(parents)} parents"
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        return "a node does not come after its parent"
    return ""


class DraftSources:
    """The drafters of a worker. The deployment's method is loaded at once; methods without weights are made
    when a request first asks for them. `remote` has the drafts of draft workers, if there are any.
    """

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        remote: RemoteDrafter | None,
        account: Account,
        estimator: Estimator,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._deployed = config.speculative_config
        self._options = self._deployed or SpeculativeConfig(method="ngram")
        self._remote = remote
        self._account = account
        self._estimator = estimator
        self.drafters: dict[Source, Drafter] = {}
        if remote is not None:
            self.drafters[REMOTE] = remote
        self.drafts_unasked = True
        """Whether requests without settings of their own draft by the deployment's method."""
        self.own: Drafter | None = None
        """The deployment's drafter, if decode workers draft with it."""
        if self._deployed is not None and self._deployed.decode_workers_draft:
            self.own = build_drafter(self._deployed.method, self._options, config, loaded)
            self.drafters[self._deployed.method] = self.own

    def attach(self, pool: KVPool) -> None:
        self._pool = pool
        for drafter in self.drafters.values():
            drafter.attach(self._loaded, pool)

    def register_method(self, method: Source) -> None:
        """Tell the estimator what the drafter, which is ready, can draft and what it reads."""
        drafter = self.drafters[method]
        has_kv = drafter.kv_group is not None
        self._estimator.add_method(
            method,
            draft_shape(method, self._options),
            self._options.max_speculative_tokens,
            reads_text=has_kv,
            reads_prompts=has_kv and bool(drafter.hidden_layers),
        )

    def new_request(self, sequence: SequenceState) -> SpeculatingRequest:
        source = self.source(sequence)
        if source is None or self._fixed_tokens(sequence) == 0 or not self._is_able(source):
            request = self._estimator.new_request(None, 0)
        else:
            request_class: RequestClass = "greedy" if sequence.request.sampling.is_greedy else "sampled"
            request = self._estimator.new_request(source, None, request_class)
            self.limit(request, sequence)
        request.origin = _origin(sequence)
        return request

    def _is_able(self, source: Source) -> bool:
        """Return whether the source can draft, and count a request for which it cannot."""
        if source not in self.drafters:
            self._add(source)
        if self.is_unable(source):
            self._account.could_not_draft(source)
            return False
        return True

    def is_unable(self, source: Source | None) -> bool:
        """Return whether it is known that the source cannot draft on this host."""
        return source is not None and source in self.drafters and not self.drafters[source].is_able

    def _add(self, source: Source) -> None:
        assert source != REMOTE  # always there if a request may use it
        self.drafters[source] = build_drafter(source, self._options, self._config, self._loaded)
        self.drafters[source].attach(self._loaded, self._pool)
        self.register_method(source)

    def source(self, sequence: SequenceState) -> Source | None:
        """Return the source of the sequence's drafts: by its plan, its request or the deployment's choice.

        A plan that names a drafter that this worker lacks counts as a plan without drafts.
        """
        asked, plan = sequence.request.speculation or RequestSpeculation(), sequence.draft_plan
        is_unasked = sequence.request.speculation is None
        if not asked.enabled or (is_unasked and not self.drafts_unasked):
            return None
        source: Source | None
        if plan is None:
            source = asked.method or (self._deployed.method if self._deployed is not None else None)
        else:
            source = REMOTE if plan.at is not None else plan.method
        if source is None or source in self.drafters or source in WEIGHTLESS:
            return source
        if plan is not None:
            self._account.lost_draft(sequence.request_id, f"the plan was {source}, which this worker lacks")
        return None

    def may_draft_here(self, sequence: SequenceState, source: Source | None) -> bool:
        """Return whether this worker may draft the text that a grammar forces, in addition to the drafts of
        `source`. Draft workers do that themselves, while the target's tokens are on their way.
        """
        asked = sequence.request.speculation
        is_off = asked is not None and not asked.enabled
        return not is_off and self._fixed_tokens(sequence) != 0 and source != REMOTE

    def keeps_its_worker(self, source: Source | None, sequence: SequenceState) -> bool:
        """Return whether the sequence's plan still names the worker that makes its drafts, if one does."""
        if source != REMOTE:
            return True
        assert self._remote is not None and sequence.draft_plan is not None
        return self._remote.is_made_by(sequence.request_id, sequence.draft_plan.at)

    def limit(self, request: SpeculatingRequest, sequence: SequenceState) -> None:
        """Set how many tokens the request drafts: the number it asks for, limited by its plan."""
        fixed, plan = self._fixed_tokens(sequence), sequence.draft_plan
        request.most = plan.max_tokens if plan is not None else None
        if request.method == "lookahead" and fixed:
            fixed = self._options.lookahead_rows  # lookahead takes all rows or none
        elif fixed is not None and request.most is not None:
            fixed = min(fixed, request.most)
        request.fixed_tokens = fixed

    def _fixed_tokens(self, sequence: SequenceState) -> int | None:
        """Return the number of tokens that the request asks for, else the deployment's; None means "auto"."""
        asked = sequence.request.speculation
        fixed = asked.num_speculative_tokens if asked is not None else None
        return self._options.fixed_tokens if fixed is None else fixed


def _origin(sequence: SequenceState) -> Origin:
    if sequence.handed_over:
        return "handed_over"
    return "prefix_hit" if sequence.num_cached else "computed"


MAX_FORCED = 16
"""The most tokens of a forced draft: more rows in a step cost a CPU about what they save."""


class GrammarDrafts:
    """Drafts under a grammar: forced text is drafted at no cost, and forbidden tokens are not verified."""

    def __init__(self, grammars: Grammars, account: Account) -> None:
        self._grammars = grammars
        self._account = account
        self.forced: set[SequenceState] = set()
        """The sequences whose draft in the current step comes from their grammar."""

    def draft(self, step: ScheduledStep, sequences: Sequence[SequenceState], make_room: MakeRoom) -> None:
        """Draft the text that grammars force. The model may write it with other tokens."""
        started = time.perf_counter()
        for sequence in sequences:
            tokens = self._grammars.forced(sequence.sampling_row())[:MAX_FORCED]
            if tokens and (room := make_room(step, sequence, len(tokens))):
                sequence.draft = Draft(tokens[:room])
                self.forced.add(sequence)
        self._account.drafted("grammar", time.perf_counter() - started)

    def constrain(self, sequence: SequenceState, draft: Draft, method: Source) -> Draft:
        """Return the draft without the end that the grammar forbids. An empty one is returned, too: its
        drafter must learn that no token was accepted. Drafts with probes stay whole.
        """
        if draft.probes:
            return draft
        num_nodes = self._num_allowed(sequence, draft)
        if num_nodes == draft.num_nodes:
            return draft
        self._account.cut(method, draft.num_nodes - num_nodes)
        return draft.first(num_nodes)

    def count(self, step: ScheduledStep) -> None:
        """Count the grammars' drafts; hide them from drafters, which see tokens decoded one by one."""
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if sequence in self.forced and outcome.draft is not None:
                self._account.verified("grammar", outcome.draft.num_nodes, outcome.num_accepted)
                outcome.draft = outcome.verdict = None

    def _num_allowed(self, sequence: SequenceState, draft: Draft) -> int:
        """Return the number of nodes before the end that the grammar forbids."""
        row = sequence.sampling_row()
        allowed: set[int] = {-1}
        for node in range(draft.num_nodes):
            if draft.parent(node) in allowed and self._grammars.allows(row, draft.path(node)):
                allowed.add(node)
        return max(allowed) + 1
