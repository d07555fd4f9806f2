"""The engine: one model on one device. Requests go in, each step brings tokens out.

Single-threaded: only the thread that calls `step` may call anything but `stats`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import msgspec
import torch
from torch import Tensor

from engine.activations import activation_bytes
from engine.block_manager import BlockManager
from engine.calibration import measure_steps
from engine.check import check_adapter, check_hybrid, check_request
from engine.chunk_bound import ChunkBound
from engine.draft import Outcome, Verdict
from engine.embeddings import embeddings, wants_embedding
from engine.grammar_tokenizer import load_grammar_tokenizer
from engine.kv_pool import Allocate, KVPool, pool_blocks
from engine.launch import Launched, StepLauncher
from engine.loader import LoadedModel
from engine.lora.files import AdapterError
from engine.outputs import Kept, failure, keep_tokens, token_output
from engine.pool_layout import PoolLayout
from engine.prefix_cache import reserve_blocks
from engine.prefix_room import PrefixRoom, find_room
from engine.profiling import ProfilingRun
from engine.recurrent.layout import StateLayout
from engine.results import EngineStats, Reservation, StepResult
from engine.runner import AheadRunner
from engine.sampler import Grammars, Sampler
from engine.scheduler import ScheduledStep, Scheduler
from engine.seating import Seating
from engine.select_forward import MakeRunner, load_packed, runner_of_one_process
from engine.sequence import SequenceStage, SequenceState
from engine.speculation_interface import Speculator
from engine.start_up import describe_start
from engine.step_times import StepTimes, work_of
from engine.tiers.build import build_tiers
from protocol.config import ServeConfig
from protocol.costs import StepCosts, itl_bound
from protocol.errors import ConfigError, InvalidRequestError
from protocol.handoff import REBUILD, DraftState, Extent, SegmentInfo
from protocol.kv_events import CacheFormat
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import DraftPlan, EngineRequest
from protocol.speculation import SpeculationState

logger = logging.getLogger("tandem.engine")

Speculate = Callable[[ServeConfig, LoadedModel], Speculator | None]
"""Makes the speculator of a model; None disables speculation."""


class Engine:
    """Loads the model, sizes and takes the KV pool, then serves. Errors at load name their cause."""

    on_fetched: Callable[[], None] | None = None
    """Called in another thread when blocks for a waiting request have come from the disk: `step` helps."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        allocate: Allocate | None = None,
        speculate: Speculate | None = None,
        make_runner: MakeRunner = runner_of_one_process,
    ) -> None:
        """`allocate` gives the memory of a pool on the CPU. The runner is to be made once that is there."""
        started = time.monotonic()
        loaded = load_packed(config)
        self.config = config
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.weights = loaded.weights
        """Tells them from others of the same name."""
        self.adapters = loaded.adapters
        """What requests may name; None without `--enable-lora`."""
        self._load_adapters()
        if loaded.recurrent is not None:
            check_hybrid(config, make_runner is not runner_of_one_process, loaded.recurrent.state.grid)
        self._speculator = speculate(config, loaded) if speculate is not None else None
        self._state = self._state_layout(loaded)
        self.kv_format = loaded.kv_group.describe(config.block_size)
        if self._state is not None:
            self.kv_format += f" and {self._state.describe()}"
        self.cache_format = CacheFormat(
            model=f"{config.model_name}@{self.weights}",
            kv_format=self.kv_format,
            block_size=config.block_size,
            has_states=self._state is not None,
        )
        hidden_layers = self._speculator.hidden_layers if self._speculator is not None else ()
        self.feature_size = len(hidden_layers) * loaded.hidden_size
        """Values in the hidden state that the drafter reads of one token."""
        if config.enable_embeddings:
            hidden_layers = (loaded.num_layers,)
        budget = _token_budget(config, loaded.device)
        layout, kept_free = self._layout(loaded), 0
        is_sized_by_gpu = loaded.device.type == "cuda" and config.kv_cache_memory_bytes is None
        if is_sized_by_gpu and make_runner is runner_of_one_process:  # ranks would have to take part
            trial = partial(make_runner, config, loaded, hidden_layers=hidden_layers)
            kept_free = activation_bytes(trial, layout, loaded.device, budget, config.max_num_seqs)
        num_blocks = pool_blocks(config, layout, loaded.device, loaded.max_model_len, kept_free)
        self.pool = KVPool(layout, num_blocks, loaded.device, allocate)
        self.tiers = build_tiers(config, self.pool, bytes.fromhex(self.weights), self._fetched)
        tiers = [self.tiers] if self.tiers is not None else []
        self.blocks = BlockManager(self.pool, config.enable_prefix_caching, tiers)
        self._runner = make_runner(config, loaded, self.pool, hidden_layers)
        vocabulary = loaded.vocab_size, loaded.eos_token_ids
        self._grammars = Grammars(partial(load_grammar_tokenizer, config, *vocabulary))
        self._sampler = Sampler(loaded.vocab_size, loaded.device, loaded.eos_token_ids, self._grammars)
        self._sequences: dict[str, SequenceState] = {}
        self._order = itertools.count()
        self._eos = frozenset(loaded.eos_token_ids)
        self._own_threads = torch.get_num_threads()
        self._steps = 0
        self._started_at = 0.0
        self._ended_at: float | None = None
        """When the latest step ended, if there was more to do."""
        bound_s = itl_bound(config.itl_budget, config.slo_tpot or inf)
        self._times = StepTimes(budget, self.pool.token_bytes, bound_s)
        self._seating = Seating(self.pool.seats, self.blocks) if self.pool.seats is not None else None
        self._scheduler = Scheduler(
            self.blocks,
            model=self.cache_format.model,
            kv_format=self.kv_format,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            fetcher=self.tiers,
            bound=ChunkBound(self._costs_now, bound_s, config.block_size),
            seating=self._seating,
        )
        runs_ahead = self.device.type != "cpu" and self._speculator is None and self._state is None
        self._launcher = StepLauncher(
            self._runner,
            self._sampler,
            self._scheduler,
            self._runner if runs_ahead and isinstance(self._runner, AheadRunner) else None,
        )
        load_s = time.monotonic() - started
        compile_s = self._runner.warm_up()
        self._sampler.warm_up(loaded.dtype)
        self._profile(loaded, budget)
        self.start_up = describe_start(config, loaded, self.pool, self._runner, self.tiers, load_s, compile_s)

    def _load_adapters(self) -> None:
        for name, path in (self.config.lora_modules or {}).items():
            assert self.adapters is not None
            try:
                self.adapters.load(name, path)
            except AdapterError as error:
                raise ConfigError(f"--lora-modules: {name}: {error}") from error

    def _state_layout(self, loaded: LoadedModel) -> StateLayout | None:
        if loaded.recurrent is None:
            return None
        most = self._speculator.most_drafted if self._speculator is not None else 0
        return loaded.recurrent.state.with_drafts(most)

    def _layout(self, loaded: LoadedModel) -> PoolLayout:
        """For the model's KV, and that of the speculator's draft, if it has any."""
        groups = [loaded.kv_group]
        if self._speculator is not None and self._speculator.kv_group is not None:
            groups.append(self._speculator.kv_group)
        draft_state = self._speculator.state_layout if self._speculator is not None else None
        count, size = self.config.max_num_seqs, self.config.block_size
        return PoolLayout(tuple(groups), size, self._state, count, draft_state)

    def _profile(self, loaded: LoadedModel, budget: int) -> None:
        """Measure what steps take and what drafts cost, over blocks that are free afterwards."""
        with ProfilingRun(self.blocks, self._runner, loaded.max_model_len) as profiling:
            steps = measure_steps(profiling, self._profile_sampling, self.config.max_num_seqs, budget)
            self._times.seed(steps)
            if self._speculator is not None:
                self._speculator.attach(loaded, self.pool, self._sampler)
                self._speculator.warm_up(profiling)
        if not self.config.paged_kv:
            self.blocks.least_blocks = -(-loaded.max_model_len // self.config.block_size)

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
        with `drafts_elsewhere` the draft's KV of its prompt is left to whoever takes the blocks over. With
        `hold_at` it drafts for a target: it is held whenever it has so many tokens, until `give`.

        Raises `InvalidRequestError` when the request cannot be served by this model.
        """
        self._check(request)
        sequence = SequenceState(request, next(self._order), prefill_only, drafts_elsewhere, hold_at)
        self._take(sequence)
        self._scheduler.add_waiting(sequence)

    def reserve(self, request: EngineRequest, foreign_format: str = "") -> Reservation | None:
        """Blocks for the whole prompt, which another worker fills; None when there is no room now.

        `foreign_format` names what the blocks will hold if that is not what this engine would compute: only
        reservations of the same format share them. Raises `InvalidRequestError`.
        """
        self._check(request)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        root = self._scheduler.root(request, foreign_format)
        reserved = reserve_blocks(self.blocks, token_ids, root, from_state=False)
        if reserved is None:
            return None
        if self.tiers is not None:
            self.tiers.finish()
        holdings, covered = reserved
        self._scheduler.prefix_query_tokens += len(token_ids)
        self._scheduler.prefix_hit_tokens += covered
        return Reservation(request, holdings, covered, time.monotonic())

    def room_for_prefix(self, request: EngineRequest) -> PrefixRoom | None:
        """Blocks to bring what the request's prefix cache lacks from elsewhere, before `add`; None if there
        is no room, or no such cache. Raises `InvalidRequestError`.
        """
        self._check(request)
        if not self.blocks.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return None
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        room = find_room(self.blocks, token_ids, self._scheduler.root(request))
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
        """Decode a request whose prompt is computed up to position `num_computed`, the rest of it here;
        `first_token`, already streamed, follows it.

        Blocks that hold something else than the reservation said are not `shareable`. `draft` is what came of
        the drafter's state.
        """
        request = reservation.request
        sequence = SequenceState(request, next(self._order), arrival=reservation.since)
        self._take(sequence)
        sequence.holdings = reservation.holdings
        sequence.holdings.shareable = shareable
        sequence.num_computed = num_computed
        sequence.num_cached = reservation.covered
        sequence.handed_over = True
        sequence.holdings.publish(sequence.token_ids, num_computed)
        sequence.append(first_token)
        if self._speculator is not None:
            self._speculator.begin(sequence, draft)
        sequence.first_scheduled = sequence.first_token_time = time.monotonic()
        self._scheduler.add_waiting(sequence)

    def draft_state(self, request_id: str) -> DraftState:
        """What the drafter knows of a finished prefill beside the blocks, to be handed over."""
        return self._speculator.state(request_id) if self._speculator is not None else REBUILD

    def resume(self, request_id: str) -> None:
        """Decode here after all a request added with `prefill_only`, whether its prompt is done or not; or
        go on with one that is held.
        """
        sequence = self._sequences[request_id]
        sequence.prefill_only = False
        if sequence.stage is SequenceStage.RUNNING:
            sequence.held.drop_state()
        if sequence.stage is SequenceStage.HELD and not sequence.is_to_be_held:
            self._scheduler.add_waiting(sequence)

    def hold(self, request_id: str) -> None:
        """Do not run it until `resume`. It keeps its blocks; one that has none yet gets them first."""
        self._scheduler.hold(self._sequences[request_id])

    def give(self, request_id: str, token_ids: Sequence[int], hold_at: int) -> int:
        """What a target's sequence has beyond the tokens that were given: `SequenceState.give`. It drafts up
        to `hold_at` tokens from now on, if it is resumed.
        """
        sequence = self._sequences[request_id]
        agreed = sequence.give(token_ids)
        sequence.hold_at = hold_at
        if len(sequence.token_ids) >= hold_at:
            self._scheduler.hold(sequence)
        return agreed

    def drafted(self, request_id: str) -> list[int]:
        """What it has drafted beyond the tokens that were given."""
        sequence = self._sequences[request_id]
        return sequence.token_ids[sequence.num_given :]

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Its drafts are made elsewhere from now on. Unknown requests are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.draft_plan = plan
        if self._speculator is not None:
            self._speculator.replan(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever stage it is; False when it is not known."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._forget(sequence)
        return True

    # --- tokens out ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._launcher.is_ahead)

    def step(self) -> StepResult:
        return self.run(self.schedule())

    def schedule(self) -> ScheduledStep:
        """Choose what `run` computes; nothing else may be asked of the engine in between."""
        self._started_at = self._ended_at or time.perf_counter()
        self._ended_at = None
        expired = self._expire()
        if self.tiers is not None:
            self.tiers.poll()
        step = self._launcher.step_ahead() or self._scheduler.schedule()
        step.expired = expired
        return step

    def run(self, step: ScheduledStep) -> StepResult:
        """One packed forward over what the scheduler chose. On a device the next one is launched before this
        one's tokens are waited for, where that can be: see `engine/launch.py`.
        """
        result = StepResult(outputs=step.expired)
        launched = self._launcher.take_ahead()
        if launched is None:
            if not step.sequences:
                return result
            launched = self._launch(step)
        self._launcher.launch_behind(launched)
        self._steps += 1
        packed = launched.packed
        work = work_of(step.sequences, step.num_tokens)
        result.num_tokens = packed.num_tokens
        self._collect_prompt_logprobs(packed.prompts, launched.logits[packed.num_sampled_rows :])
        verdicts = dict(zip(packed.sampled, self._verify(launched), strict=True))
        vectors = embeddings(launched) if self.config.enable_embeddings else {}
        for sequence, count in zip(step.sequences, step.num_tokens, strict=True):
            output = self._commit(sequence, count, verdicts.get(sequence), step)
            if output is not None:
                if sequence in vectors:
                    output = msgspec.structs.replace(output, embedding=vectors[sequence])
                result.outputs.append(output)
        if self._speculator is not None:
            self._speculator.finish(step, launched.hidden if self.feature_size else None)
        launched.free_kept()
        ended = time.perf_counter()
        self._times.observe(work, ended - self._started_at, step.outcomes, self._spread)
        self._ended_at = ended if self.has_work() else None
        return result

    def computed(self, request_id: str, first: int = 0) -> list[Extent]:
        """Of a prefill, the blocks of each arena from `first` on whose KV is final: full ones, and at the
        prompt's end the partial last one and those of the state.
        """
        sequence = self._sequences[request_id]
        if sequence.held.state and sequence.stage is SequenceStage.HELD:
            return sequence.held.extents(first)
        partial = self.config.block_size - 1 if sequence.stage is SequenceStage.HELD else 0
        return sequence.held.extents(first, (sequence.num_computed + partial) // self.config.block_size)

    @property
    def segments(self) -> list[SegmentInfo]:
        """What a hand-off consists of, for peers."""
        return [*self.pool.segments, *([self._state.segment()] if self._state is not None else [])]

    def num_places(self, num_tokens: int) -> int:
        """Places for tokens in the blocks that a hand-off of so many takes, those of a state among them."""
        if self._state is None:
            return num_tokens
        size = self.config.block_size
        return (-(-num_tokens // size) + self.pool.state_blocks) * size

    def state_position(self, num_tokens: int) -> int:
        """Up to where a hand-off of so many tokens brings all that the next one needs."""
        return num_tokens if self._state is None else self._state.position(num_tokens)

    def stats(self) -> EngineStats:
        """A snapshot of the load; may be called from any thread."""
        scheduler, blocks = self._scheduler, self.blocks
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            waiting_tokens=sum(sequence.num_uncomputed for sequence in list(scheduler.waiting)),
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            steps=self._steps,
        )

    def counters(self) -> dict[str, float]:
        """The use of the tiers below the pool, totals, and speculation's, in Prometheus' naming; for any
        thread.
        """
        counters = self.tiers.totals() if self.tiers is not None else {}
        if room_wait_s := self._scheduler.room_wait_s:
            counters["kv_room_wait_seconds_total"] = room_wait_s
        return counters | (self._speculator.counters() if self._speculator is not None else {})

    def costs(self) -> StepCosts:
        """What steps take; for any thread."""
        return self._times.costs()

    def speculation(self) -> SpeculationState | None:
        """What speculation does and costs at present, None where nothing could; for any thread."""
        return self._speculator.report() if self._speculator is not None else None

    def close(self) -> None:
        """Let the disk tier finish what it was given. Idempotent."""
        if self.tiers is not None:
            self.tiers.close()

    @property
    def _spread(self) -> float:
        """Threads of a step, as a multiple of those at the start."""
        return torch.get_num_threads() / self._own_threads

    def _costs_now(self) -> StepCosts:
        return self._times.latest.on(self._spread)

    # --- inside -------------------------------------------------------------------------------------

    def _profile_sampling(self, sequences: Sequence[SequenceState], logits: Tensor) -> None:
        self._sampler.sample(logits, [sequence.sampling_row() for sequence in sequences])
        for sequence in sequences:
            self._sampler.forget(sequence.request_id)

    def _fetched(self) -> None:
        if self.on_fetched is not None:
            self.on_fetched()

    def _take(self, sequence: SequenceState) -> None:
        if self.adapters is not None:
            sequence.adapter = self.adapters.acquire(sequence.request.adapter)
        self._sequences[sequence.request_id] = sequence

    def _check(self, request: EngineRequest) -> None:
        if request.request_id in self._sequences:
            raise InvalidRequestError("request_id", f"{request.request_id} is already running")
        check_request(request, self.vocab_size, self.max_model_len, self.config.max_logprobs)
        if request.sampling.embeds and not self.config.enable_embeddings:
            raise InvalidRequestError("embeds", "needs --enable-embeddings")
        if request.adapter is not None:
            check_adapter(request.adapter, self.adapters)
        if request.sampling.grammar is not None:
            self._grammars.compile(request.sampling.grammar)

    def _forget(self, sequence: SequenceState) -> None:
        self._launcher.keep(sequence)
        self._scheduler.remove(sequence)
        self._sampler.forget(sequence.request_id)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        del self._sequences[sequence.request_id]
        if self.adapters is not None:
            self.adapters.release(sequence.adapter)

    def _expire(self) -> list[TokenOutput]:
        now = time.monotonic()
        queued = self._scheduler.running + self._scheduler.waiting
        return [
            self._fail(sequence, "timeout", f"not finished within {sequence.request.timeout_s:g} s")
            for sequence in queued
            if now > sequence.deadline
        ]

    def _fail(self, sequence: SequenceState, kind: ErrorKind, reason: str) -> TokenOutput:
        self._forget(sequence)
        return TokenOutput(
            request_id=sequence.request_id, token_ids=[], finish_reason="error", error_kind=kind, error=reason
        )

    def _collect_prompt_logprobs(self, prompts: list[tuple[SequenceState, int]], logits: Tensor) -> None:
        """`logits` are those of the prompts' chunks, in order: (sequence, its number of rows)."""
        for sequence, count in prompts:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)
            targets = sequence.prompt_token_ids[sequence.num_computed + 1 : sequence.num_computed + 1 + count]
            num_top = sequence.params.prompt_logprobs or 0
            rows = self._sampler.prompt_logprobs(logits[: len(targets)], targets, num_top)
            sequence.prompt_logprobs.extend(rows)
            logits = logits[count:]

    def _launch(self, step: ScheduledStep) -> Launched:
        wants_hidden = False
        if self._speculator is not None:
            scheduler = self._scheduler
            wants_hidden = self._speculator.prepare(step, scheduler.num_active, scheduler.make_room)
        if self.config.enable_embeddings:
            wants_hidden = any(map(wants_embedding, step.sequences))
        return self._launcher.launch(step, wants_hidden)

    def _verify(self, launched: Launched) -> list[Verdict]:
        """What each of the sequences that sample in this step gets."""
        sampled = launched.packed.sampled
        if not sampled:
            return []
        logits = launched.logits[: launched.packed.num_sampled_rows]
        if launched.choice is None:
            assert self._speculator is not None
            return self._speculator.verify(sampled, logits)
        output = self._sampler.finish(launched.choice, logits, launched.rows)
        failed = set(output.failed_rows)
        return [
            Verdict([token_id], [], [logprobs], failed=index in failed)
            for index, (token_id, logprobs) in enumerate(zip(output.token_ids, output.logprobs, strict=True))
        ]

    def _commit(
        self, sequence: SequenceState, count: int, verdict: Verdict | None, step: ScheduledStep
    ) -> TokenOutput | None:
        """The KV of `count` tokens was computed, and that of the drafts that `verdict` accepts."""
        start, draft, sequence.draft = sequence.num_computed, sequence.draft, None
        first_drafted = start + count
        num_rows = count + (len(draft.token_ids) if draft is not None else 0)
        kept = Kept()
        accepted: list[int] = []
        if verdict is not None and not verdict.failed:
            kept = keep_tokens(sequence, verdict.token_ids, self._eos)
            accepted = verdict.accepted[: len(kept.token_ids)]
        sequence.num_computed = first_drafted + len(accepted)
        outcome = Outcome(start, count + len(accepted), num_rows, len(accepted), draft, verdict)
        step.outcomes.append(outcome)
        if verdict is not None and verdict.failed:
            return self._fail(sequence, *failure(sequence))
        if sequence.hold_at is None:
            sequence.held.commit(first_drafted, accepted, sequence.token_ids)
            if self.pool.seats is not None:
                self.pool.seats.move(sequence.seat, first_drafted, accepted)
        else:
            sequence.held.publish(sequence.token_ids, min(sequence.num_computed, sequence.num_given))
        if self._seating is not None:
            self._seating.stepped(sequence)
        if verdict is None:
            return None
        output = token_output(sequence, kept, outcome)
        if kept.finish_reason is not None:
            self._forget(sequence)
        elif sequence.is_to_be_held:
            self._scheduler.hold(sequence)
        return output


def _token_budget(config: ServeConfig, device: torch.device) -> int:
    """Tokens in one step. Small steps bring first tokens sooner, and cost a CPU no throughput."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(512 if device.type == "cpu" else 2048, config.max_num_seqs)
