"""The engine: one model on one device. It takes requests, and each step returns tokens.

Only the thread that calls `step` may call a method, unless the method says otherwise.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec
import torch

from costs.steps import ChunkBound, StepTimes, work_of
from engine.assembly import Assembly, check_adapter, check_request, load_served
from engine.devices.loaded_model import LoadedModel
from engine.kv.block_manager import BlockManager
from engine.kv.pool import Allocate
from engine.kv.prefix_cache import PrefixRoom, find_room, reserve_blocks
from engine.kv.sequence_blocks import HandoffLayout
from engine.parallel.leader import Leader
from engine.phases import phase
from engine.start_up import describe_start, is_deterministic
from engine.step.launch import StepLauncher, embeddings
from engine.step.live_sequences import EngineStats, LiveSequences, Reservation, StepResult
from engine.step.profiling import ProfilingRun, measure_steps
from engine.step.scheduler import ScheduledStep, Scheduler
from engine.step.sequence import SequenceStage, SequenceState
from engine.step.slot_allocator import StateSlotAllocator
from engine.step.speculation_interface import Speculator
from engine.triton_support import Compilations
from protocol.config import ServeConfig
from protocol.costs import StepCosts
from protocol.errors import InvalidRequestError
from protocol.handoff import REBUILD, DraftState, Extent
from protocol.requests import DraftPlan, EngineRequest
from protocol.speculation import SpeculationState

logger = logging.getLogger("tandem.engine")

Speculate = Callable[[ServeConfig, LoadedModel], Speculator]
"""A function that makes the speculator of a model."""


class Engine:
    """A loaded model with its KV pool, scheduler, sampler and speculator. Errors at load name their cause."""

    on_ready: Callable[[], None] | None = None
    """A function, called in another thread, when a waiting request may be able to run in the next `step`: its
    blocks have come from the disk, or its grammar is compiled.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        allocate: Allocate | None = None,
        speculate: Speculate | None = None,
        leader: Leader | None = None,
    ) -> None:
        """Load the model. `allocate` gives the memory of a CPU pool; `leader` leads the other ranks."""
        started = time.monotonic()
        loaded = load_served(config, leader)
        self.config = config
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.weights = loaded.weights
        """Digest of the weights, to tell them from other weights of the same name."""
        self.adapters = loaded.adapters
        """The adapters that requests may name; None without `--enable-lora`."""
        self._speculator = Speculator() if speculate is None else speculate(config, loaded)
        assembly = Assembly(config, loaded, self._speculator, leader)
        self.cache_format = assembly.cache_format
        self.feature_size = len(self._speculator.hidden_layers) * loaded.hidden_size
        """Number of values in the hidden states that the drafter reads for one token."""
        pool = self.pool = assembly.pool(allocate)
        self._runner = assembly.runner(pool)
        self.tiers = assembly.tiers(pool, self._ready)
        budget = assembly.token_budget
        self.blocks = BlockManager(pool, config.enable_prefix_caching, self.tiers, assembly.windows, budget)
        self.handoff = HandoffLayout(pool, self.blocks.tables, assembly.state)
        self._grammars = assembly.grammars
        self._sampler = assembly.sampler()
        bound_s = assembly.itl_bound_s
        self.times = StepTimes(budget, pool.token_bytes, bound_s, assembly.layout.windows)
        slots = pool.state_slots
        self._slot_allocator = None if slots is None else StateSlotAllocator(slots, self.blocks, pool)
        self.scheduler = Scheduler(
            self.blocks,
            model=self.cache_format.model,
            kv_format=self.cache_format.kv_format,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            fetcher=self.tiers if config.kv_disk_path is not None else None,
            bound=ChunkBound(self._costs_now, bound_s, config.block_size),
            slot_allocator=self._slot_allocator,
        )
        self._launcher = StepLauncher(
            self._runner,
            self._sampler,
            self.scheduler,
            self._speculator,
            runs_ahead=loaded.device.type != "cpu",
            embeds=config.enable_embeddings,
        )
        self.sequences = LiveSequences(
            self.scheduler,
            self._launcher,
            self._sampler,
            self._speculator,
            self._slot_allocator,
            self.adapters,
            self.eos_token_ids,
        )
        self._order = itertools.count()
        self._own_threads = torch.get_num_threads()
        self._kept_cores: Callable[[], bool] | None = None
        self._steps = 0
        self._started_at = 0.0
        self._ended_at: float | None = None
        """The end of the latest step, if there was more to do."""
        load_s = time.monotonic() - started
        compile_s = self._runner.warm_up()
        with phase("warming up by measured steps", "seconds"):
            self._warm_up(loaded, budget)
        if not config.paged_kv:
            self.blocks.least_tokens = self.max_model_len
        self.start_up = describe_start(config, loaded, pool, self._runner, self.tiers, load_s, compile_s)
        if self._speculator.off_because:
            self.start_up["speculation"] = f"none ({self._speculator.off_because})"
        self._compilations = Compilations() if self._sampler.has_kernels else None

    def prepare_grammars(self) -> None:
        """Load what requests with grammars need. Call it before serving."""
        self._grammars.prepare()

    def _warm_up(self, loaded: LoadedModel, budget: int) -> None:
        self._sampler.warm_up(loaded.dtype)
        with closing(ProfilingRun(self.blocks, self._runner, self.max_model_len)) as profiling:
            self.times.seed(measure_steps(profiling, self._sampler, self.config.max_num_seqs, budget))
            self._speculator.attach(loaded, self.pool, self._sampler)
            is_exact = loaded.dtype == torch.float32 or is_deterministic(self.config, loaded, self._runner)
            self._speculator.warm_up(profiling, is_exact=is_exact)

    @property
    def runs_on_any_threads(self) -> bool:
        """Whether torch's number of threads may change between two steps without changing a token."""
        return self._runner.any_threads

    # --- requests in --------------------------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        *,
        prefill_only: bool = False,
        drafts_elsewhere: bool = False,
        hold_at: int | None = None,
    ) -> None:
        """Queue a request. With `prefill_only` it samples one token and holds its blocks until `abort`;
        with `drafts_elsewhere` the worker that takes over the blocks computes the prompt's draft KV. With
        `hold_at` it drafts for a target: it is held whenever it has `hold_at` tokens, until `give`.

        Raise `InvalidRequestError` if this model cannot serve the request.
        """
        self._check(request)
        sequence = SequenceState(request, next(self._order), prefill_only, drafts_elsewhere, hold_at)
        self.sequences.take(sequence)
        self._queue(sequence)

    def reserve(self, request: EngineRequest, foreign_format: str = "") -> Reservation | None:
        """Reserve blocks for the whole prompt, which another worker fills; return None without room now.

        `foreign_format` names the contents of the blocks if this engine would compute other values: only
        reservations of the same format share such blocks. Raise `InvalidRequestError`.
        """
        self._check(request)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        root = self.scheduler.root(request, foreign_format)
        reserved = reserve_blocks(self.blocks, token_ids, root)
        if reserved is None:
            return None
        if self.tiers is not None:
            self.tiers.finish()
        sequence_blocks, covered = reserved
        reservation = Reservation(request, sequence_blocks, covered, time.monotonic())
        self.scheduler.prefix_query_tokens += len(token_ids)
        self.scheduler.prefix_hit_tokens += reservation.num_cached
        return reservation

    def room_for_prefix(self, request: EngineRequest) -> PrefixRoom | None:
        """Reserve blocks for the part of the prompt that the prefix cache lacks and another worker sends
        before `add`; return None without room or prefix caching. Raise `InvalidRequestError`.
        """
        self._check(request)
        if not self.blocks.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return None
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        room = find_room(self.blocks, token_ids, self.scheduler.root(request))
        if self.tiers is not None:
            self.tiers.finish()
        return room

    def activate(
        self,
        reservation: Reservation,
        first_token: int,
        num_computed: int,
        *,
        shareable: bool = True,
        draft: DraftState = REBUILD,
    ) -> None:
        """Decode a request whose prompt is computed up to position `num_computed`; compute the rest here.
        `first_token`, already streamed, follows the prompt.

        Blocks are not `shareable` if their contents differ from what the reservation said. `draft` is the
        drafter's state that came with the hand-off.
        """
        request = reservation.request
        sequence = SequenceState(request, next(self._order), arrival=reservation.since)
        self.sequences.take(sequence)
        sequence.sequence_blocks = reservation.sequence_blocks
        sequence.sequence_blocks.shareable = shareable
        sequence.num_computed = num_computed
        sequence.num_cached = reservation.num_cached
        sequence.handed_over = True
        sequence.sequence_blocks.publish(sequence.token_ids, num_computed)
        sequence.append(first_token)
        self._speculator.begin(sequence, draft)
        sequence.first_scheduled = sequence.first_token_time = time.monotonic()
        self._queue(sequence)

    def draft_state(self, request_id: str) -> DraftState:
        """Return the drafter's state of a finished prefill, to be handed over with the blocks."""
        return self._speculator.state(request_id)

    def resume(self, request_id: str) -> None:
        """Decode here a request that was added with `prefill_only`, whether its prompt is done or not; or
        continue a held request.
        """
        sequence = self.sequences[request_id]
        sequence.prefill_only = False
        if sequence.stage is SequenceStage.RUNNING and sequence.held.state is not None:
            sequence.held.state.drop()
        if sequence.stage is SequenceStage.HELD and not sequence.is_to_be_held:
            self.scheduler.add_waiting(sequence)

    def give(self, request_id: str, token_ids: Sequence[int], hold_at: int) -> int:
        """Give the sequence the target's next tokens (`SequenceState.give`) and a new `hold_at`, up to which
        it drafts after `resume`.
        """
        sequence = self.sequences[request_id]
        agreed = sequence.give(token_ids)
        sequence.hold_at = hold_at
        if len(sequence.token_ids) >= hold_at:
            self.scheduler.hold(sequence)
        return agreed

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Change the request's draft plan. Ignore an unknown request."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return
        sequence.draft_plan = plan
        self._speculator.replan(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request in any stage; return False if it is unknown."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        self.sequences.forget(sequence)
        return True

    # --- tokens out ---------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._launcher.is_ahead)

    def step(self) -> StepResult:
        return self.run(self.schedule())

    def schedule(self) -> ScheduledStep:
        """Choose the step that `run` computes. Call nothing else between the two."""
        self._started_at = self._ended_at or time.perf_counter()
        self._ended_at = None
        expired = self.sequences.expire() + self.sequences.refuse()
        if self.tiers is not None:
            self.tiers.poll()
        step = self._launcher.step_ahead() or self.scheduler.schedule()
        step.expired = expired
        return step

    def run(self, step: ScheduledStep) -> StepResult:
        """Run the scheduled step in one packed forward. On a GPU, launch the next step, where possible,
        before waiting for this step's tokens: see `engine/step/launch.py`.
        """
        result = StepResult(outputs=step.expired)
        launched = self._launcher.take_ahead()
        if launched is None:
            if not step.sequences:
                return result
            launched = self._launcher.launch(step)
        self._launcher.launch_ahead(launched)
        self._steps += 1
        packed = launched.packed
        work = work_of(step.sequences, step.num_tokens)
        result.num_tokens = packed.num_tokens
        self._launcher.collect_prompt_logprobs(launched)
        verdicts = dict(zip(packed.sampled, self._launcher.verdicts(launched), strict=True))
        vectors = embeddings(launched) if self.config.enable_embeddings else {}
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            output = self.sequences.commit(sequence, count, verdicts.get(sequence), step)
            if output is not None:
                if sequence in vectors:
                    output = msgspec.structs.replace(output, embedding=vectors[sequence])
                result.outputs.append(output)
        self._speculator.finish(step, launched.hidden if self.feature_size else None)
        launched.free_kept()
        ended = time.perf_counter()
        if self._kept_cores is None or self._kept_cores():
            accepted = sum([outcome.num_accepted for outcome in step.outcomes])
            self.times.observe(work, ended - self._started_at, accepted, self._spread)
        self._ended_at = ended if self.has_work() else None
        return result

    def computed(self, request_id: str, firsts: Sequence[int] = ()) -> list[Extent]:
        """Return the blocks of a prefill whose KV is final, in each table from its place in `firsts` on: full
        blocks and, once the prompt is done, the partial last block and the state's blocks.
        """
        sequence = self.sequences[request_id]
        is_over = sequence.stage is SequenceStage.HELD
        partial = self.config.block_size - 1 if is_over else 0
        last = (sequence.num_computed + partial) // self.config.block_size
        return sequence.held.extents(last, firsts, with_state=is_over)

    def stats(self) -> EngineStats:
        """Return a snapshot of the load. May be called from any thread."""
        return EngineStats.of(self.scheduler, self.blocks, self._steps)

    def counters(self) -> dict[str, float]:
        """Return counters of kept states, of the tiers below the pool, of compiled kernels and of
        speculation, in Prometheus' naming. May be called from any thread.
        """
        counters = self.tiers.totals() if self.tiers is not None else {}
        if self._slot_allocator is not None:
            counters |= self._slot_allocator.totals()
        if self._compilations is not None:
            counters |= self._compilations.totals()
        if room_wait_s := self.scheduler.room_wait_s:
            counters["kv_room_wait_seconds_total"] = room_wait_s
        return counters | self._speculator.counters()

    def speculation(self) -> SpeculationState:
        """Return a report on speculation. May be called from any thread."""
        return self._speculator.report()

    def close(self) -> None:
        """Let the disk tier finish its writes. Idempotent."""
        if self.tiers is not None:
            self.tiers.close()

    def borrow(self, kept: Callable[[], bool]) -> None:
        """Note that idle workers lend cores from now on. `kept` returns after a step whether the step had the
        same cores as the previous one, to its end. The duration of a step that lost cores is not recorded.
        """
        self._kept_cores = kept
        self.times.borrows = True

    @property
    def _spread(self) -> float:
        """Number of threads of a step as a multiple of the number at the start."""
        return torch.get_num_threads() / self._own_threads

    def _costs_now(self) -> StepCosts:
        return self.times.latest.on(self._spread)

    # --- inside -------------------------------------------------------------------------------------

    def _ready(self) -> None:
        if self.on_ready is not None:
            self.on_ready()

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self.sequences:
            raise InvalidRequestError("request_id", f"{request.request_id} is already running")
        check_request(request, self.vocab_size, self.max_model_len, self.config.max_logprobs)
        if request.sampling.embeds and not self.config.enable_embeddings:
            raise InvalidRequestError("embeds", "needs --enable-embeddings")
        if request.adapter is not None:
            check_adapter(request.adapter, self.adapters)
        if request.sampling.grammar is not None:
            self._grammars.compile(request.sampling.grammar)  # while the request waits

    def _queue(self, sequence: SequenceState) -> None:
        """Queue the sequence, which runs once its grammar is compiled, if it has one."""
        if sequence.params.grammar is not None:
            sequence.grammar = compiled = self._grammars.compile(sequence.params.grammar)
            if not compiled.done():
                compiled.add_done_callback(lambda _: self._ready())
        self.scheduler.add_waiting(sequence)
