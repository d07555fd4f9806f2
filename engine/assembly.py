"""Assembly of an engine's parts from its configuration and its model, and checks of options and requests
against the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import PoolLayout
from engine.kv.pool import Allocate, KVPool, pool_blocks
from engine.kv.state_slots import StateLayout
from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.host import MIN_SLOTS_WITH_DISK, HostMemory, HostTier
from engine.kv.tiers.slot_file import ENTRY_BYTES, SlotFile, check_free_space, claim_folder
from engine.load.select import load_packed, runner_of_one_process
from engine.lora.config import AdapterError
from engine.lora.table import NOTHING, Adapters
from engine.parallel.leader import Leader
from engine.parallel.pools import rank_layout
from engine.parallel.runner import share_of
from engine.sampler import Grammars, Sampler, SamplingRow
from engine.sampler.grammars import load_vocabulary
from engine.step.profiling import activation_bytes
from engine.step.speculation_interface import Speculator
from engine.usable_memory import usable_memory
from protocol.config import ServeConfig
from protocol.costs import itl_bound
from protocol.errors import ConfigError, InvalidRequestError
from protocol.kv_events import CacheFormat, Window
from protocol.requests import Adapter, EngineRequest
from protocol.sampling import SamplingParams, check_sampling_params
from protocol.speculation import WEIGHTLESS

logger = logging.getLogger("tandem.engine")


def load_served(config: ServeConfig, leader: Leader | None) -> LoadedModel:
    """Load the packed model and the adapters that `config` names. Raise like `load_model`."""
    loaded = load_packed(config, on_host=leader is not None and not leader.ranks.shares_memory)
    if leader is not None:
        loaded = share_of(config, loaded, leader.ranks)
    for name, path in (config.lora_modules or {}).items():
        assert loaded.adapters is not None
        try:
            loaded.adapters.load(name, path)
        except AdapterError as error:
            raise ConfigError(f"--lora-modules: {name}: {error}") from error
    if loaded.recurrent is not None:
        check_hybrid(config, loaded.recurrent.state.grid)
    return loaded


@dataclass(frozen=True)
class Assembly:
    """Maker of one engine's parts, in the order in which they need each other."""

    config: ServeConfig
    loaded: LoadedModel
    speculator: Speculator
    leader: Leader | None
    """The leader of the worker's other ranks; None without other ranks."""

    @cached_property
    def token_budget(self) -> int:
        """Most tokens in one step. Small steps bring first tokens sooner and cost a CPU no throughput."""
        if self.config.max_num_batched_tokens is not None:
            return self.config.max_num_batched_tokens
        return max(512 if self.loaded.device.type == "cpu" else 2048, self.config.max_num_seqs)

    @cached_property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states the runner captures."""
        return (self.loaded.num_layers,) if self.config.enable_embeddings else self.speculator.hidden_layers

    @cached_property
    def state(self) -> StateLayout | None:
        """The layout of a sequence's recurrent state; None without recurrent layers."""
        if self.loaded.recurrent is None:
            return None
        return self.loaded.recurrent.state.with_drafts(self.speculator.most_drafted)

    @cached_property
    def layout(self) -> PoolLayout:
        """The layout of the KV of the model and of the speculator's draft, if it has any.

        The KV is divided into block tables by window if a draft's KV finds room in a table that sees enough:
        the draft may have to catch up over all tokens. With recurrent layers it is not divided, since their
        state lags behind the last token.
        """
        groups = [group for group in (self.loaded.kv_group, self.speculator.kv_group) if group is not None]
        if self.state is None and self.config.paged_kv:
            target, *drafts = groups
            rows = self.config.kv_wire_dtype == "auto" and self._divider_of_pools is None
            target = target.in_tables(self.loaded.max_model_len, rows=rows)
            groups = groups if any(map(target.draft_fault, drafts)) else [target, *drafts]
        size, count = self.config.block_size, self.config.max_num_seqs
        return PoolLayout(tuple(groups), size, self.state, count, self.speculator.state_layout)

    @property
    def windows(self) -> list[Window | None]:
        """The window of each block table."""
        size = self.config.block_size
        return [Window(window, size) if window else None for window in self.layout.windows]

    @cached_property
    def cache_format(self) -> CacheFormat:
        kv_format = self.layout.groups[0].describe(self.config.block_size)
        if self.state is not None:
            kv_format += f" and {self.state.describe()}"
        return CacheFormat(
            model=f"{self.config.model_name}@{self.loaded.weights}",
            kv_format=kv_format,
            block_size=self.config.block_size,
            has_states=self.state is not None,
            window=self.layout.windows[0] if len(self.layout.windows) == 1 else 0,
        )

    def pool(self, allocate: Allocate | None) -> KVPool:
        device, longest = self.loaded.device, self.loaded.max_model_len
        spans = [
            window.span() + window.span(self.token_budget) if window is not None else None
            for window in self.windows
        ]
        layout, leader = self.layout, self._divider_of_pools
        if leader is not None:
            size = leader.ranks.size
            each = (rank_layout(self.layout, size, rank) for rank in range(size))
            layout = max(each, key=lambda own: own.block_bytes)
        num_blocks = pool_blocks(self.config, layout, device, longest, self._kept_free(), spans)
        if leader is not None:
            return leader.pool(self.layout, num_blocks, device)
        return KVPool(layout, num_blocks, device, allocate)

    @property
    def _divider_of_pools(self) -> Leader | None:
        """The leader, if each rank has its own pool, with the KV of its own heads; else None."""
        return None if self.leader is None or self.leader.ranks.shares_memory else self.leader

    def tiers(self, pool: KVPool, on_fetched: Callable[[], None]) -> HostTier | None:
        """Make the tiers below the pool; return None if `config` asks for none. `on_fetched` is called in
        another thread when blocks have come from the disk. Raise `ConfigError`, naming the flag.
        """
        config = self.config
        if config.kv_offloading_size == 0:
            return None
        num_slots, leader = _host_slots(config, pool), self._divider_of_pools
        memory = HostMemory(pool.memory, num_slots) if leader is None else leader.host_memory(pool, num_slots)
        if config.kv_disk_path is None:
            return HostTier(memory)
        fingerprint = bytes.fromhex(self.loaded.weights)
        file = _open_file(config, Path(config.kv_disk_path), memory.block_bytes, fingerprint)
        return HostTier(memory, DiskTier(file, memory.buffer, on_fetched))

    def runner(self, pool: KVPool) -> Runner:
        make = self.leader.runner if self.leader is not None else runner_of_one_process
        return make(self.config, self.loaded, pool, self.hidden_layers)

    @cached_property
    def grammars(self) -> Grammars:
        vocabulary = self.loaded.vocab_size, self.loaded.eos_token_ids
        return Grammars(partial(load_vocabulary, self.config, *vocabulary))

    def sampler(self) -> Sampler:
        loaded = self.loaded
        return Sampler(loaded.vocab_size, loaded.device, loaded.eos_token_ids, self.grammars)

    @property
    def itl_bound_s(self) -> float:
        return itl_bound(self.config.itl_budget, self.config.slo_tpot or inf)

    def _kept_free(self) -> int:
        """Return the bytes to keep free for a step and its graphs, if GPU memory sizes the pool; else 0. With
        ranks a step is estimated, not measured, since all ranks would have to run it.
        """
        device = self.loaded.device
        is_sized_by_gpu = device.type == "cuda" and self.config.kv_cache_memory_bytes is None
        if not is_sized_by_gpu:
            return 0
        budget, rows = self.token_budget, self._logit_rows
        if self.leader is not None:
            text, loaded = self.loaded.model.config.get_text_config(decoder=True), self.loaded
            shape = loaded.hidden_size, getattr(text, "intermediate_size", None) or 0, loaded.vocab_size
            step = reckoned_step(*shape, loaded.dtype, num_tokens=budget, rows=rows)
        else:
            adapter = 0 if self.loaded.adapters is None else NOTHING
            step = activation_bytes(
                self.runner, self.layout, device, budget, rows, self._sample_trial, adapter
            )
        kept = step << self._num_captured
        logger.info(
            "%d MiB stay free next to the KV pool: %d for a step of %d tokens, %d of them with logits, "
            "and up to %d for CUDA graphs",
            kept >> 20,
            step >> 20,
            budget,
            rows,
            (kept - step) >> 20,
        )
        return kept

    @property
    def _logit_rows(self) -> int:
        """The most rows of a step that need logits: each sequence's last token and its draft tokens."""
        return min(self.token_budget, self.config.max_num_seqs * (1 + self.speculator.most_drafted))

    @property
    def _num_captured(self) -> int:
        """Number of models captured as graphs. Each may take half of the memory that is free at its
        capture.
        """
        if self.config.enforce_eager:
            return 0
        options = self.config.speculative_config
        return 1 if options is None or options.method in WEIGHTLESS else 2

    def _sample_trial(self, logits: Tensor) -> None:
        """Sample with the parameters that take the most memory."""
        params = SamplingParams(max_tokens=1, logprobs=1, logit_bias={0: 1.0})
        rows = [SamplingRow(params, [], [], 0, "")] * len(logits)
        sampler, options = self.sampler(), self.config.speculative_config
        sampler.sample(logits, rows)
        if options is not None and options.verification != "coupled":
            sampler.probabilities(logits, rows)


_LIVE_ROWS = 8
"""Activations of an MLP's size that a step holds at once: residual, normed, made, sent and gathered ones."""


def reckoned_step(
    hidden: int, intermediate: int, vocab_size: int, dtype: torch.dtype, *, num_tokens: int, rows: int
) -> int:
    """Estimate the bytes of a step's activations and of its logits, once in `dtype` and twice in float32."""
    activations = _LIVE_ROWS * num_tokens * max(hidden, intermediate) * dtype.itemsize
    return activations + rows * vocab_size * (dtype.itemsize + 8)


def _host_slots(config: ServeConfig, pool: KVPool) -> int:
    block_bytes = pool.block_bytes
    nbytes = _gib(config.kv_offloading_size)
    num_slots = nbytes // block_bytes
    least = MIN_SLOTS_WITH_DISK if config.kv_disk_path is not None else 1
    if num_slots < least:
        raise ConfigError(
            f"--kv-offloading-size: {config.kv_offloading_size:g} GiB hold {num_slots} blocks of "
            f"{block_bytes} bytes; at least {least} are needed"
        )
    available = usable_memory().available - (0 if pool.is_cuda else pool.num_bytes)
    if nbytes > available:
        raise ConfigError(
            f"--kv-offloading-size: {config.kv_offloading_size:g} GiB are asked for, this host has "
            f"{max(0, available) / 2**30:.3g} GiB free next to the KV pool"
        )
    return num_slots


def _open_file(config: ServeConfig, path: Path, block_bytes: int, fingerprint: bytes) -> SlotFile:
    capacity = (_gib(config.kv_disk_size) - ENTRY_BYTES) // (block_bytes + ENTRY_BYTES)
    if capacity < 1:
        raise ConfigError(f"--kv-disk-size: {config.kv_disk_size:g} GiB hold no block of {block_bytes} bytes")
    folder = claim_folder(path)
    try:
        check_free_space(folder.path, _gib(config.kv_disk_size))
        file = SlotFile(folder, block_bytes, capacity, fingerprint)
    except OSError as error:
        folder.release()
        raise ConfigError(f"--kv-disk-path: cannot use {folder.path}: {error}") from error
    except ConfigError:
        folder.release()
        raise
    logger.info("%s: %d of %d KV blocks found again", folder.path, len(file.stored), capacity)
    return file


def _gib(size: float) -> int:
    return int(size * 2**30)


def check_request(request: EngineRequest, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
    """Raise `InvalidRequestError`, naming the field and its limit."""
    if not request.prompt_token_ids:
        raise InvalidRequestError("prompt", "must hold at least one token")
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
    ):
        greatest = max(token_ids, default=0)
        if greatest >= vocab_size:
            raise InvalidRequestError(name, f"token ids must be below {vocab_size}, got {greatest}")
    check_sampling_params(request.sampling, vocab_size, max_logprobs)
    if len(request.output_token_ids) >= request.sampling.max_tokens:
        raise InvalidRequestError(
            "output_token_ids", f"must be fewer than max_tokens={request.sampling.max_tokens}"
        )
    length = len(request.prompt_token_ids) + request.sampling.max_tokens
    if length > max_model_len:
        raise InvalidRequestError(
            "max_tokens",
            f"{len(request.prompt_token_ids)} prompt tokens and {request.sampling.max_tokens} new ones "
            f"exceed the limit of {max_model_len} tokens",
        )


def check_adapter(adapter: Adapter, adapters: Adapters | None) -> None:
    """Raise `InvalidRequestError` if the adapter cannot be used here. Load it if it is not loaded yet."""
    if adapters is None:
        raise InvalidRequestError("model", f"{adapter.name}: adapters need --enable-lora")
    try:
        adapters.require(adapter)
    except AdapterError as error:
        raise InvalidRequestError("model", f"{adapter.name}: {error}") from error


def check_hybrid(config: ServeConfig, grid: int) -> None:
    """Raise `ConfigError`, naming the option, if a model with recurrent layers cannot have it. States of
    these layers are kept every `grid` tokens.
    """
    if grid % config.block_size and config.block_size % grid:
        raise ConfigError(
            f"--block-size: {config.block_size}: recurrent layers have states every {grid} tokens, and one "
            "of the two numbers must divide the other"
        )
    options = {
        "--compile: on": config.compile == "on",
        "--kv-wire-dtype": config.kv_wire_dtype != "auto",
    }
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(
                f"{option}: not supported for a model with recurrent layers: remove this option"
            )
