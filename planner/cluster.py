"""A simulated cluster: the router's own registry, loads, index and policies with simulated workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from planner.engine import SimulatedEngine, SimulatedSequence
from planner.events import Events
from planner.kv_room import KvRoom
from planner.profile import Profile
from planner.request import SimulatedRequest
from planner.worker import SimulatedHandoff, SimulatedWorker
from protocol.costs import itl_bound
from protocol.kv_events import Medium
from protocol.peers import PeerAddress
from protocol.worker_to_router import PairState, Register, WorkerState
from router.dispatch.placer import FIRST_OUTPUT, OUTPUT_PACE
from router.placement import PlacementPolicy
from router.placement.interface import Placement, PolicyState, Refusal, RequestFacts
from router.placement.slo import refusal as slo_refusal
from router.workers.demand import DemandMeter
from router.workers.kv_index import KvIndex
from router.workers.loads import Loads
from router.workers.registry import Registry, Worker

REPORT_INTERVAL_S = 0.25
"""Seconds between two reports of a worker's KV usage, like heartbeats."""


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
    def __init__(
        self,
        layout: ClusterLayout,
        profile: Profile,
        block_tokens: int,
    ) -> None:
        bound_s = itl_bound(profile.costs.itl_budget_s, layout.slo_tpot_s)
        costs = msgspec.structs.replace(profile.costs, itl_budget_s=bound_s)
        self.events = Events()
        self._layout, self._profile = layout, msgspec.structs.replace(profile, costs=costs)
        self._block_tokens = block_tokens
        self.num_ended = 0
        self.meter = DemandMeter()
        self._registry = Registry(worker_timeout=inf, max_rows=profile.max_num_seqs)
        self._loads = Loads(self._registry)
        self._index: KvIndex[str] = KvIndex()
        self._state = PolicyState()
        self._mean_output = FIRST_OUTPUT
        self._order = itertools.count()
        self._reported_at = -inf
        self._handoffs: dict[SimulatedRequest, SimulatedHandoff] = {}
        names = [f"{role}-{number}" for number, role in enumerate(layout.roles)]
        self.workers = {
            name: self._start(name, role, names) for name, role in zip(names, layout.roles, strict=True)
        }
        if max(profile.decode_beside, profile.prefill_beside) > 1:
            engines = [worker.engine for worker in self.workers.values()]
            for engine in engines:
                engine.neighbours = [other for other in engines if other is not engine]

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Simulate all requests to their ends."""
        for request in requests:
            self.events.at(request.arrival, lambda request=request: self._place(request))  # type: ignore[misc]
        self.events.run()

    def _start(self, name: str, role: str, peers: Sequence[str]) -> SimulatedWorker:
        profile, slot = self._profile, self._index.add_holder(name)
        incarnation = f"{name}-{next(self._order)}"
        room = KvRoom(
            profile.kv_tokens,
            self._block_tokens,
            lambda blocks: self._index.store(slot, Medium.GPU, blocks),
            lambda blocks: self._index.evict(slot, Medium.GPU, blocks),
            profile.keeping,
        )
        engine = SimulatedEngine(profile, room, self.events)
        worker = self._registry.register(_registration(name, incarnation, role, peers, profile))
        assert worker is not None
        simulated = SimulatedWorker(worker, engine, profile.wire, profile.costs, slot)
        engine.on_scheduled = self._on_scheduled
        engine.on_computed = self._on_computed
        engine.on_first_token = self._on_first_token
        engine.on_finished = self._on_finished
        engine.on_room = lambda: self._serve(simulated)
        return simulated

    # --- the router -----------------------------------------------------------------------------------

    def _place(self, request: SimulatedRequest) -> None:
        self._report()
        facts, cluster = self._facts(request), self._registry.cluster
        placement, self._state = self._layout.policy.place(facts, cluster, self._state)
        late = placement if isinstance(placement, Refusal) else slo_refusal(facts, cluster, placement)
        if late is not None:
            request.is_refused = True
            request.ended = self.events.now
            self.num_ended += 1
            self.meter.refused(late, self._registry.live())
            return
        assert isinstance(placement, Placement)
        request.assigned = {task: self._registry.named(name) for task, name in placement.workers.items()}
        request.workers = placement.workers
        first = self._named(request.holders[0])
        source = placement.prefix or first.known.key.worker_id
        cached = min(facts.cached_tokens.get(source, 0), request.num_tokens - 1)
        self._loads.assign(request, request.num_tokens - cached)
        self.meter.placed(request, first.known)
        arrives_at = self.events.now + self._profile.request_s
        if placement.prefix is not None:
            arrives_at = max(arrives_at, self._fetch(request, first, self.workers[placement.prefix]))
        self.events.at(arrives_at, lambda: self._submit(request, first))

    def _facts(self, request: SimulatedRequest) -> RequestFacts:
        window = self._profile.keeping.window(self._block_tokens)
        index, blocks = self._index, request.blocks
        found = index.find(blocks) if window is None else index.find_windows(blocks, window)
        return RequestFacts(
            num_tokens=request.num_tokens,
            output_tokens=min(request.output_tokens, self._mean_output),
            mean_output_tokens=self._mean_output,
            disaggregate=self._layout.disaggregation,
            cached_tokens={name: count * self._block_tokens for name, count in found.items()},
            slo_ttft_s=self._layout.slo_ttft_s,
            slo_tpot_s=self._layout.slo_tpot_s,
        )

    def _report(self) -> None:
        if self.events.now - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = self.events.now
        for simulated in self.workers.values():
            simulated.known.load.kv_usage = simulated.engine.room.usage
            self._registry.changed(simulated.known)

    def _named(self, worker: Worker) -> SimulatedWorker:
        return self.workers[worker.key.worker_id]

    # --- a request's way ------------------------------------------------------------------------------

    def _fetch(self, request: SimulatedRequest, first: SimulatedWorker, holder: SimulatedWorker) -> float:
        """Send the blocks that `first` lacks, after the holder's current step. Return the time of their
        arrival.
        """
        lacking = first.engine.room.covered(request.blocks)
        blocks = request.blocks[lacking : holder.engine.room.covered(request.blocks)]
        if not blocks:
            return self.events.now
        tokens = self._profile.costs.kept_tokens(len(blocks) * self._block_tokens)
        arrives_at = holder.send(tokens, holder.engine.boundary())
        self.events.at(arrives_at, lambda: first.engine.room.insert(blocks))
        return arrives_at

    def _submit(self, request: SimulatedRequest, first: SimulatedWorker) -> None:
        prompt = SimulatedSequence(request, next(self._order), request.num_tokens, request.output_tokens)
        if request.was_split:
            prompt.hands_over = True
            receiver = self._named(request.assigned["decode"])
            self._handoffs[request] = SimulatedHandoff(prompt, first, receiver)
        first.engine.submit(prompt)

    def _on_scheduled(self, sequence: SimulatedSequence) -> None:
        handoff = self._handoffs.get(sequence.request)
        if handoff is not None:
            handoff.receiver.reserving.append(handoff)
            self._serve(handoff.receiver)

    def _serve(self, receiver: SimulatedWorker) -> None:
        """Start hand-offs for which the receiver has room now."""
        while receiver.reserving and receiver.reserving[0].reserve():
            self._push(receiver.reserving.popleft())

    def _on_computed(self, sequence: SimulatedSequence) -> None:
        handoff = self._handoffs[sequence.request]
        if handoff.is_granted:
            self._push(handoff)

    def _push(self, handoff: SimulatedHandoff) -> None:
        handoff.push(self.events.now)
        if handoff.prompt.has_answered:
            taken_at = handoff.arrives_at + self._profile.handoff_s
            self.events.at(taken_at, lambda: self._take_over(handoff))

    def _take_over(self, handoff: SimulatedHandoff) -> None:
        request = handoff.prompt.request
        del self._handoffs[request]
        self._loads.leave_prefill(request)
        handoff.sender.engine.free(handoff.prompt)
        handoff.receiver.engine.join(handoff.received(next(self._order)))

    def _on_first_token(self, sequence: SimulatedSequence) -> None:
        request = sequence.request
        request.first_token = self.events.now
        self.meter.answered(request, request.holders[0], request.ttft_s, self._layout.slo_ttft_s)
        self._loads.answered(request)

    def _on_finished(self, sequence: SimulatedSequence) -> None:
        request = sequence.request
        request.ended = self.events.now
        handoff = self._handoffs.pop(request, None)
        if handoff is not None:
            handoff.withdraw()
        self.meter.finished(request.assigned["decode"], request.tpot_s, self._layout.slo_tpot_s)
        self._mean_output += OUTPUT_PACE * (request.output_tokens - self._mean_output)
        self._loads.release(request)
        self.num_ended += 1


def _registration(name: str, incarnation: str, role: str, peers: Sequence[str], profile: Profile) -> Register:
    """Return the registration of a worker with the profile's figures."""
    wire = profile.wire
    links = [
        PairState(
            peer=peer, transport="", in_use=True, latency_s=wire.latency_s, bytes_per_s=wire.bytes_per_s
        )
        for peer in peers
    ]
    num_blocks = profile.kv_tokens // profile.block_size * len(profile.costs.kv_windows)
    state = WorkerState(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        total_blocks=num_blocks,
        free_blocks=num_blocks,
        pairs=links,
        costs=profile.costs,
    )
    return Register(
        address=PeerAddress(worker_id=name, incarnation=incarnation, control="", offers=[]),
        role=role,
        model=profile.name,
        max_model_len=profile.keeping.longest(profile.kv_tokens),
        vocab_size=1,
        eos_token_ids=[],
        state=state,
    )
