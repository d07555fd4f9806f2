"""Drafts made by draft workers, on both sides: on a decode worker the drafts that have arrived and the tokens
that are wanted, on a draft worker the speculator of its engine.

A decode worker does not wait. A request without a draft at hand decodes without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over, select_backend
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.load.select import build_runner
from engine.sampler import Sampler
from engine.step.draft import Draft, Outcome
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceStage, SequenceState
from engine.step.speculation_interface import Speculator
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import PeerAddress
from speculation.chains import NativeChain
from speculation.drafter import Drafter

Use = Literal["usable", "stale", "late"]
"""Comparison of an arriving chain with the committed tokens: it extends them, differs, or ends earlier."""


@dataclass(eq=False)
class RemoteRequest:
    """A request whose drafts come from the draft worker `at`; `sequence` has its committed tokens.

    The target verifies up to `granted` tokens in a step. `chain` is the newest draft: tokens that may follow
    the first `start` ones.
    """

    sequence: SequenceState
    at: PeerAddress
    granted: int
    start: int = 0
    chain: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def num_wanted(self) -> int:
        """The most tokens that can be used: this step's draft, the target's own token, and the next draft."""
        return 2 * self.granted + 1 if self.granted else 0

    def take(self, start: int, token_ids: list[int]) -> Use:
        """Take a chain that arrived. It replaces the present one unless that reaches further."""
        use = self._use(start, token_ids)
        if use == "usable" and start + len(token_ids) > self.start + len(self.chain):
            self.start, self.chain = start, token_ids
        return use

    def _use(self, start: int, token_ids: list[int]) -> Use:
        since = self.sequence.token_ids[start:]
        if start > len(self.sequence.token_ids) or since[: len(token_ids)] != token_ids[: len(since)]:
            return "stale"
        return "usable" if len(token_ids) > len(since) else "late"

    def draft(self, count: int) -> Draft | None:
        """Return up to `count` tokens to follow the committed ones, if the chain agrees with those."""
        if self.chain and self._use(self.start, self.chain) != "usable":
            self.start, self.chain = 0, []
        if not self.chain:
            return None
        first = len(self.sequence.token_ids) - self.start
        return Draft(self.chain[first : first + count])


class RemoteDrafter(Drafter):
    """A drafter that proposes the drafts that draft workers have sent. Between two steps the decode worker's
    loop delivers them, and reads `requests` and `ended` to see what to ask for.
    """

    def __init__(self, first_granted: int) -> None:
        """Want `first_granted` tokens of a request until the controller's first plan."""
        self.requests: dict[str, RemoteRequest] = {}
        self.ended: list[RemoteRequest] = []
        """The requests whose end the draft workers must be told."""
        self.answers: dict[str, float] = {}
        """Mean seconds until each draft worker's answer arrives. Written by the loop's thread."""
        self._first_granted = first_granted

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        plan = sequence.draft_plan
        assert plan is not None and plan.at is not None
        known = self.requests.get(sequence.request_id)
        if known is not None and known.at == plan.at:
            return  # it was preempted, which draft workers need not know
        self.forget(sequence.request_id)
        granted = min(self._first_granted, plan.max_tokens)
        self.requests[sequence.request_id] = RemoteRequest(sequence, plan.at, granted)

    def is_made_by(self, request_id: str, worker: PeerAddress | None) -> bool:
        """Return whether `worker` makes the request's drafts at present."""
        request = self.requests.get(request_id)
        return request is not None and request.at == worker

    def grant(self, request_id: str, num_tokens: int) -> None:
        """Verify `num_tokens` draft tokens of the request per step from now on."""
        request = self.requests.get(request_id)
        if request is not None:
            request.granted = num_tokens

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        requests = [self.requests[sequence.request_id] for sequence in sequences]
        return [request.draft(count) for request, count in zip(requests, counts, strict=True)]

    def forget(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.ended.append(request)


AT_ONCE = 8
"""The most draft tokens of a request per step. An additional token costs a tenth of a step of its own, but
the engine only learns after the step which drafts the target has contradicted meanwhile.
"""


class MultiStepSpeculator(Speculator):
    """The speculator of a draft worker, which makes several draft tokens of a request in one step, or one
    without the native decoder. It verifies nothing, since each token of its engine is a draft for another
    worker.
    """

    def __init__(self, config: ServeConfig, loaded: LoadedModel) -> None:
        """Raise `ConfigError` if the draft model cannot drop tokens."""
        if loaded.recurrent is not None:
            name = loaded.model.config.model_type
            raise ConfigError(
                f"--speculative-config: model: {name}: a draft with recurrent state is not supported on "
                "draft workers"
            )
        self._config = config
        self._chain: NativeChain | None = None

    def attach(self, loaded: LoadedModel, pool: KVPool, sampler: Sampler) -> None:
        backend_class, _ = select_backend(loaded.device, loaded.dtype, self._config.attention_backend)
        backend = backend_over(backend_class, pool.layers(TARGET), pool.groups[TARGET])
        chains = build_runner(loaded, backend, self._config.compile).chains
        if chains is not None:
            self._chain = NativeChain(chains, loaded.vocab_size, "coupled")

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        """Draft further tokens for requests that got a token in this step and want more."""
        if self._chain is None:
            return
        drafting: list[tuple[int, SequenceState, Outcome]] = []
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if outcome.verdict is None or sequence.stage is not SequenceStage.RUNNING:
                continue
            wanted = (sequence.hold_at or 0) - len(sequence.token_ids)
            count = min(AT_ONCE - 1, wanted)
            if self._has_room(sequence, count):
                drafting.append((count, sequence, outcome))
        if not drafting:
            return
        drafting.sort(key=lambda each: -each[0])
        counts, sequences = [each[0] for each in drafting], [each[1] for each in drafting]
        rows = [
            SequenceRows(each.token_ids[each.num_computed :], each.num_computed, each.held.blocks)
            for each in sequences
        ]
        drafts = self._chain.draft(sequences, rows, counts)
        for (count, sequence, outcome), draft in zip(drafting, drafts, strict=True):
            for token_id in draft.token_ids:
                sequence.append(token_id)
            sequence.num_computed += count
            outcome.num_tokens += count
            outcome.num_accepted += count  # so the router learns how many tokens a step gives a row

    def _has_room(self, sequence: SequenceState, count: int) -> bool:
        if count <= 0 or self._chain is None or not self._chain.can_draft([sequence]):
            return False
        return sequence.held.grow(sequence.num_computed, len(sequence.token_ids) + count)

    def may_go_ahead(self, step: ScheduledStep, num_active: int) -> bool:
        return False  # a step may end with several tokens
