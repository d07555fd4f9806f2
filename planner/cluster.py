"""A simulated cluster: the router's registry, loads, index and policies, with engines on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import attrgetter

import msgspec

from engine.kv.prefix_cache import find_room, hold_blocks, reserve_blocks
from engine.kv.sequence_blocks import SequenceBlocks
from engine.step.sequence import SequenceState
from planner.engine import Clock, TimedEngine
from planner.profile import Profile
from planner.trace import TraceRequest
from protocol.costs import StepCosts, itl_bound
from protocol.ids import PeerAddress
from protocol.kv_events import CacheFormat
from protocol.requests import EngineRequest
from protocol.roles import Task
from protocol.sampling import SamplingParams
from protocol.worker_to_router import PairState, Register, WorkerState
from router.dispatch.placer import FIRST_OUTPUT, OUTPUT_PACE
from router.placement import PlacementPolicy
from router.placement.interface import Placement, PolicyState, Refusal, RequestFacts
from router.placement.predict import refusal as slo_refusal
from router.workers.assignment import Assignment, Loads
from router.workers.kv_index import KvIndex, block_keys, hash_blocks
from router.workers.registry import Registry, Worker

REPORT_INTERVAL_S = 0.25
"""Seconds between a worker's reports of its KV usage, like heartbeats."""
_PROMPT_IDS, _OWN_IDS = 2**30, 2**31
"""Bounds of token ids: shared prompt tokens are below the first, a request's own from the second on."""


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request of a trace. Its `hash_ids` name the contents of its prompt's blocks of `block_tokens` tokens.
    Times are simulated seconds. `ended` is the time of the last token, or of the refusal. `workers` has the
    names of the workers that it was placed on.
    """

    trace: TraceRequest
    block_tokens: int
    number: int = 0
    is_refused: bool = False
    workers: Mapping[Task, str] = field(default_factory=dict)
    first_token: float = inf
    ended: float = inf
    assignment: Assignment | None = None

    @property
    def assigned(self) -> Assignment:
        assert self.assignment is not None
        return self.assignment

    @property
    def was_split(self) -> bool:
        return "prefill" in self.workers

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.trace.arrival

    @property
    def tpot_s(self) -> float:
        """Return the mean time of the tokens after the first; 0 without any."""
        further = self.trace.output_len - 1
        return (self.ended - self.first_token) / further if further > 0 else 0.0

    def engine_request(self) -> EngineRequest:
        """Return the request with token ids that are equal where the trace's block ids are equal."""
        token_ids: list[int] = []
        for hash_id in self.trace.hash_ids:
            token_ids += [hash(hash_id) % _PROMPT_IDS] * self.block_tokens
        del token_ids[self.trace.input_len :]
        token_ids += [_OWN_IDS + self.number] * (self.trace.input_len - len(token_ids))
        sampling = SamplingParams(max_tokens=self.trace.output_len)
        return EngineRequest(request_id=str(self.number), prompt_token_ids=token_ids, sampling=sampling)


class SimulatedWorker:
    """An engine, the wire on which its blocks leave, and the router's view of both.

    `reserving` holds the hand-offs that wait for room here, in strict order. `slot` is the worker's index in
    the prefix index.
    """

    def __init__(self, known: Worker, engine: TimedEngine, profile: Profile, slot: int) -> None:
        self.known, self.engine, self.slot = known, engine, slot
        self.reserving: deque[SimulatedHandoff] = deque()
        self._kv_bytes, self._wire = profile.costs.kv_bytes, profile.wire
        self._wire_free_at = 0.0

    def send(self, tokens: float, begin: float) -> float:
        """Queue the KV of `tokens` tokens, in all tables, on the wire. Return the time of arrival."""
        begin = max(begin, self._wire_free_at)
        self._wire_free_at = begin + self._wire.seconds(tokens * self._kv_bytes)
        return self._wire_free_at


@dataclass(eq=False)
class SimulatedHandoff:
    """A hand-off. The receiver reserves room (`reserved`) when the sender begins with the prompt. Each chunk
    is sent while the next one is computed.
    """

    request: EngineRequest
    sender: SimulatedWorker
    receiver: SimulatedWorker
    prompt: SequenceState | None = None
    """The sender's sequence, once a part of its prompt is computed."""
    reserved: SequenceBlocks | None = None
    num_sent: int = 0
    arrives_at: float = 0.0

    def reserve(self) -> bool:
        """Reserve room on the receiver. Return False if it has none. Blocks cached there are not sent."""
        engine = self.receiver.engine
        root = engine.root(self.request)
        found = reserve_blocks(engine.blocks, self.request.prompt_token_ids, root)
        if found is not None:
            self.reserved, self.num_sent = found
        return found is not None

    def push(self, costs: StepCosts, now: float) -> None:
        """Send the tokens computed since the last push."""
        assert self.prompt is not None
        computed = min(self.prompt.num_computed, len(self.request.prompt_token_ids))
        self.arrives_at = max(self.arrives_at, now)
        if computed > self.num_sent:
            unsent = costs.kept_tokens(computed) - costs.kept_tokens(self.num_sent)
            self.num_sent = computed
            self.arrives_at = self.sender.send(unsent, now)


@dataclass(frozen=True)
class ClusterLayout:
    """The number of workers and the policy. `disaggregation` is the option's value."""

    prefill: int
    decode: int
    policy: PlacementPolicy
    disaggregation: bool = True
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode


class SimulatedCluster:
    def __init__(self, layout: ClusterLayout, profile: Profile) -> None:
        bound_s = itl_bound(profile.costs.itl_budget_s, layout.slo_tpot_s)
        costs = msgspec.structs.replace(profile.costs, itl_budget_s=bound_s)
        self.clock = Clock()
        self._layout, self._profile = layout, msgspec.structs.replace(profile, costs=costs)
        self._registry = Registry(worker_timeout=inf, max_rows=profile.max_num_seqs)
        self._loads = Loads(self._registry)
        self._index: KvIndex[str] = KvIndex()
        self._cache = _cache_format(profile)
        self._state = PolicyState()
        self._mean_output = FIRST_OUTPUT
        self._reported_at = -inf
        self._requests: dict[str, SimulatedRequest] = {}
        """The running requests, by id."""
        self._handoffs: dict[str, SimulatedHandoff] = {}
        names = [f"{role}-{number}" for number, role in enumerate(layout.roles)]
        named = zip(names, layout.roles, strict=True)
        self.workers = {name: self._start(name, role, names) for name, role in named}
        if max(profile.decode_beside, profile.prefill_beside) > 1:
            engines = [worker.engine for worker in self.workers.values()]
            for engine in engines:
                engine.neighbours = [other for other in engines if other is not engine]

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        for number, request in enumerate(requests):
            request.number = number
            self.clock.at(request.trace.arrival, lambda request=request: self._place(request))  # type: ignore[misc]
        self.clock.run()

    def _start(self, name: str, role: str, peers: Sequence[str]) -> SimulatedWorker:
        profile = self._profile
        engine = TimedEngine(profile, self.clock)
        known = self._registry.register(_registration(name, role, peers, profile))
        assert known is not None
        worker = SimulatedWorker(known, engine, profile, self._index.add_holder(name))
        engine.on_scheduled = self._on_scheduled
        engine.on_computed = self._on_computed
        engine.on_first_token = self._on_first_token
        engine.on_finished = self._on_finished
        engine.on_room = lambda: self._serve(worker)
        return worker

    def _place(self, request: SimulatedRequest) -> None:
        self._report()
        asked = request.engine_request()
        facts, cluster = self._facts(request, asked), self._registry.cluster
        placement, self._state = self._layout.policy.place(facts, cluster, self._state)
        late = placement if isinstance(placement, Refusal) else slo_refusal(facts, cluster, placement)
        if late is not None:
            request.is_refused = True
            request.ended = self.clock.now
            return
        assert isinstance(placement, Placement)
        request.workers = placement.workers
        workers = [self._registry.named(name) for name in placement.workers.values()]
        first = self._named(workers[0])
        num_uncached = facts.num_uncached(placement.source)
        assigned = self._loads.assign(workers[0], workers[-1], request.trace.input_len, num_uncached)
        request.assignment = assigned
        self._loads.sent(assigned)
        arrives_at = self.clock.now + self._profile.request_s
        if placement.prefix is not None:
            arrives_at = max(arrives_at, self._fetch(asked, first, self.workers[placement.prefix]))
        self.clock.at(arrives_at, lambda: self._submit(request, asked, first))

    def _facts(self, request: SimulatedRequest, asked: EngineRequest) -> RequestFacts:
        cache = self._cache
        keys = hash_blocks(cache.root(), asked.prompt_token_ids, cache.block_size).keys
        for worker in self.workers.values():
            self._follow_cache(worker)
        return RequestFacts(
            num_tokens=request.trace.input_len,
            output_tokens=min(request.trace.output_len, self._mean_output),
            mean_output_tokens=self._mean_output,
            disaggregate=self._layout.disaggregation,
            cached_tokens=self._index.cached_tokens(keys, request.trace.input_len, cache),
            slo_ttft_s=self._layout.slo_ttft_s,
            slo_tpot_s=self._layout.slo_tpot_s,
        )

    def _follow_cache(self, worker: SimulatedWorker) -> None:
        for kind, run in groupby(worker.engine.log.take(), key=attrgetter("kind")):
            keys = block_keys(b"".join([event.identity for event in run]))
            change = self._index.store if kind == "stored" else self._index.evict
            change(worker.slot, keys)

    def _report(self) -> None:
        if self.clock.now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = self.clock.now
        for worker in self.workers.values():
            worker.known.load.kv_usage = worker.engine.usage
            self._registry.changed(worker.known)

    def _named(self, worker: Worker) -> SimulatedWorker:
        return self.workers[worker.key.worker_id]

    def _fetch(self, asked: EngineRequest, first: SimulatedWorker, holder: SimulatedWorker) -> float:
        """Send the blocks that `first` lacks, after the holder's current step. Return the time of arrival."""
        room = find_room(first.engine.blocks, asked.prompt_token_ids, first.engine.root(asked))
        if room is None:
            return self.clock.now
        size = self._profile.block_size
        lent = hold_blocks(holder.engine.blocks, room.wanted, room.covered // size)
        count = len(lent.identities)
        lent.free()
        tokens = self._profile.costs.kept_tokens(count * size)
        arrives_at = holder.send(tokens, holder.engine.boundary()) if count else self.clock.now
        self.clock.at(arrives_at, lambda: room.keep(count))
        return arrives_at

    def _submit(self, request: SimulatedRequest, asked: EngineRequest, first: SimulatedWorker) -> None:
        self._requests[asked.request_id] = request
        if request.was_split:
            receiver = self._named(request.assigned.decode)
            self._handoffs[asked.request_id] = SimulatedHandoff(asked, first, receiver)
        first.engine.submit(asked, prefill_only=request.was_split)

    def _on_scheduled(self, asked: EngineRequest) -> None:
        handoff = self._handoffs.get(asked.request_id)
        if handoff is not None:
            handoff.receiver.reserving.append(handoff)
            self._serve(handoff.receiver)

    def _serve(self, receiver: SimulatedWorker) -> None:
        """Start hand-offs for which the receiver has room now."""
        while receiver.reserving and receiver.reserving[0].reserve():
            handoff = receiver.reserving.popleft()
            if handoff.prompt is not None:
                self._push(handoff)

    def _on_computed(self, sequence: SequenceState) -> None:
        handoff = self._handoffs[sequence.request_id]
        handoff.prompt = sequence
        if handoff.reserved is not None:
            self._push(handoff)

    def _push(self, handoff: SimulatedHandoff) -> None:
        handoff.push(self._profile.costs, self.clock.now)
        assert handoff.prompt is not None
        if handoff.prompt.first_token_time is not None:
            self.clock.at(handoff.arrives_at + self._profile.handoff_s, lambda: self._take_over(handoff))

    def _take_over(self, handoff: SimulatedHandoff) -> None:
        asked = handoff.request
        del self._handoffs[asked.request_id]
        self._loads.taken_over(self._requests[asked.request_id].assigned)
        assert handoff.prompt is not None and handoff.reserved is not None
        handoff.sender.engine.release(handoff.prompt)
        handoff.receiver.engine.join(asked, handoff.reserved)

    def _on_first_token(self, sequence: SequenceState) -> None:
        request = self._requests[sequence.request_id]
        request.first_token = self.clock.now
        self._loads.answered(request.assigned)

    def _on_finished(self, sequence: SequenceState) -> None:
        request = self._requests.pop(sequence.request_id)
        request.ended = self.clock.now
        handoff = self._handoffs.pop(sequence.request_id, None)
        if handoff is not None:
            self._withdraw(handoff)
        self._mean_output += OUTPUT_PACE * (request.trace.output_len - self._mean_output)
        self._loads.release(request.assigned)

    def _withdraw(self, handoff: SimulatedHandoff) -> None:
        """Release the reservation, because the prompt's first token was the request's last."""
        if handoff.reserved is not None:
            handoff.reserved.free()
        else:
            handoff.receiver.reserving.remove(handoff)


def _cache_format(profile: Profile) -> CacheFormat:
    windows = profile.costs.kv_windows
    window = windows[0] if len(windows) == 1 else 0
    return CacheFormat(model=profile.name, kv_format="", block_size=profile.block_size, window=window)


def _registration(name: str, role: str, peers: Sequence[str], profile: Profile) -> Register:
    """Return the registration of a worker with the profile's figures."""
    wire, num_blocks = profile.wire, profile.num_blocks
    links = [
        PairState(
            peer=peer, transport="", in_use=True, latency_s=wire.latency_s, bytes_per_s=wire.bytes_per_s
        )
        for peer in peers
    ]
    state = WorkerState(
        worker_id=name,
        incarnation=name,
        role=role,
        total_blocks=num_blocks,
        free_blocks=num_blocks,
        pairs=links,
        costs=profile.costs,
    )
    return Register(
        address=PeerAddress(worker_id=name, incarnation=name, control="", offers=[]),
        role=role,
        model=profile.name,
        max_model_len=profile.kv_tokens,
        vocab_size=1,
        eos_token_ids=[],
        state=state,
    )
