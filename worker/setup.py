"""The setup of a worker's process: logging, CPU threads, models, engine, KV pool and other ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from engine.devices.attention import backend_for
from engine.devices.loaded_model import LoadedModel
from engine.engine import Engine
from engine.kv.pool import Allocate
from engine.load.loader import is_preloaded, keep_preloaded, load_model, model_shape
from engine.load.select import pack_model
from engine.parallel.follower import follow
from engine.parallel.group import Ranks
from engine.parallel.leader import Leader, join_by
from engine.sampler.grammars import load_vocabulary
from kvtransfer.blocks.device import queue_of
from kvtransfer.blocks.layout import JoinedBlocks
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import RegisteredPool
from kvtransfer.pairs import Pairs
from kvtransfer.transports.object_store import Carrier
from kvtransfer.transports.registry import TransportOptions, open_transports
from kvtransfer.transports.transport import Transport
from messaging.files import tls_files
from native.build import build_all
from protocol.config import ServeConfig
from protocol.errors import InvalidRequestError
from protocol.logs import log_to_stderr
from protocol.ports import worker_ports
from speculation.draft_model import check_draft, draft_config
from speculation.remote import MultiStepSpeculator, RemoteDrafter
from speculation.speculator import BatchSpeculator
from worker.launch import Launch

_ROOT = Path(__file__).parents[1]

log = logging.getLogger(__name__)


def set_up_worker_logging(config: ServeConfig, name: str) -> None:
    """Log to stderr, with the process' name in each line."""
    log_to_stderr(config.log_level, config.log_format, name)
    disable_progress_bar()


def set_up_threads(config: ServeConfig) -> None:
    """Set the CPU threads to the launcher's `worker_threads`; if unset, keep torch's default."""
    if config.worker_threads is not None:
        torch.set_num_threads(config.worker_threads)


def build_kernels() -> None:
    """Compile the kernels that are missing in the host's cache."""
    build_all(_ROOT / package for package in ("engine", "kvtransfer", "speculation"))


def remote_drafter(config: ServeConfig) -> RemoteDrafter | None:
    """Return the source of drafts from draft workers, or None without draft workers."""
    options = config.speculative_config
    if config.draft_replicas == 0 or options is None:
        return None
    return RemoteDrafter(options.max_speculative_tokens)


def build_engine(
    config: ServeConfig,
    remote: RemoteDrafter | None = None,
    *,
    holds_draft: bool = False,
    leader: Leader | None = None,
) -> tuple[Engine, RegisteredPool]:
    """Load the model, or the draft model, and allocate its pool in memory that transfers and the `leader`'s
    ranks can access. `remote` holds drafts from draft workers.

    With `shm` the receiver maps the sender's pool, and any worker may be a sender. A pool in GPU memory is
    accessed through host memory. Raises the engine's errors for a model that it cannot serve.
    """
    torch.manual_seed(0)
    memory: list[PoolMemory] = []
    shared = leader is not None or (config.num_workers > 1 and "shm" in config.transport_names)

    def lend(fd: int) -> None:
        if leader is not None:
            leader.lend(fd, config.start_timeout)

    def allocate_pool(nbytes: int) -> memoryview:
        memory.append(PoolMemory(nbytes, shared=shared, lend=lend))
        return memory[0].buffer

    build_kernels()
    if holds_draft:
        engine = _draft_engine(config, allocate_pool)
    else:
        speculator = partial(BatchSpeculator, remote=remote)
        engine = Engine(config, allocate=allocate_pool, speculate=speculator, leader=leader)
    engine.prepare_grammars()
    if memory:
        memory[0].stay_ahead(partial(_bytes_in_use, weakref.ref(engine), shared=shared))
    blocks: Tensor | JoinedBlocks = engine.pool.memory
    held = leader.held if leader is not None else []
    if held:
        blocks = JoinedBlocks(engine.pool.segments, held)
    pool = RegisteredPool(
        buffer=memory[0].buffer if memory else memoryview(bytearray()),
        block_bytes=blocks.shape[1],
        num_blocks=engine.pool.num_blocks,
        segments=tuple(engine.pool.segments),
        num_tables=engine.pool.num_tables,
        memory_fd=memory[0].fd if memory else None,
        device=blocks if not memory else None,
        queue=queue_of(blocks.device, [each.blocks.device for each in held[1:]]),
    )
    return engine, pool


def _bytes_in_use(engine: weakref.ref[Engine], *, shared: bool) -> int | None:
    """Return the number of bytes of the pool that are in use, or 0 if its pages had better wait: allocating
    private ones ahead takes as long as at first touch, so it pays while the engine has no work.
    """
    held = engine()
    if held is None:
        return None
    busy = not shared and held.has_work()
    return 0 if busy else (held.blocks.num_blocks - held.blocks.num_free) * held.pool.block_bytes


def _draft_engine(config: ServeConfig, allocate: Allocate) -> Engine:
    """Create an engine of the draft model, for targets of this configuration."""
    assert config.speculative_config is not None and config.speculative_config.model is not None
    target = model_shape(config)
    draft = draft_config(config, config.speculative_config, target.dtype)
    check_draft(model_shape(draft), target)
    return Engine(draft, allocate=allocate, speculate=MultiStepSpeculator)


def open_wires(
    config: ServeConfig, pool: RegisteredPool, name: str, pairs: Pairs, carrier: Carrier | None
) -> list[Transport]:
    """Open the transports that this worker offers under its unique `name`."""
    options = TransportOptions(
        tcp_streams=config.kv_tcp_streams,
        wire_dtype=config.kv_wire_dtype,
        wire_codec=config.kv_wire_codec,
        checksum=config.kv_checksum,
        tls=tls_files(config),
        carrier=carrier,
        ports=worker_ports(config),
    )
    return open_transports(wires_of(config), pool, name, options, pairs)


def wires_of(config: ServeConfig) -> list[str]:
    """Return the names of the transports that a worker opens. The only worker of a host leaves out `ucx`, if
    there are others: its libraries take 25 MB and a third of a second.
    """
    names = config.transport_names
    has_peers = config.num_workers > 1 or config.autoscale is not None or config.ray_address is not None
    return names if has_peers else [name for name in names if name != "ucx"] or names


def preload_models(config: ServeConfig) -> bool:
    """Load and pack the configured model and draft model, unless they are loaded already.

    Return whether anything was loaded. If loading fails, the workers load the models themselves and report
    why.
    """
    if config.device != "cpu" or is_preloaded(config):
        return False  # GPU memory cannot be allocated before the fork
    keep_preloaded([])
    torch.set_num_threads(1)  # a fork would not copy further threads
    build_kernels()
    try:
        target = _load(config)
        models = [(config, target)]
        options = config.speculative_config
        if options is not None and options.method == "draft_model" and options.model is not None:
            draft = draft_config(config, options, target.dtype)
            models.append((draft, _load(draft)))
    except Exception as error:
        log.warning("the model is loaded by each worker, as the template could not: %s", error)
        return False
    keep_preloaded(models)
    if config.tokenizer is None:  # a tokenizer from elsewhere may be on a hub that does not answer
        with suppress(InvalidRequestError):  # a worker raises it again for each request that needs a grammar
            load_vocabulary(config, target.vocab_size, target.eos_token_ids)
    return True


def _load(config: ServeConfig) -> LoadedModel:
    loaded = load_model(config)
    for parameter in loaded.model.parameters():
        # Transformers may leave the parameter in the mapped file, which another process could overwrite.
        parameter.data = parameter.data.clone()
    backend, _ = backend_for(config, loaded.device, loaded.dtype)
    return pack_model(loaded, config.compile, backend)


def fork_ranks(launch: Launch, on_fork: Callable[[str], None]) -> Leader | None:
    """Fork a worker's other ranks, if any, from its only thread. Each rank calls `on_fork` with its name."""
    config = launch.config
    size = config.num_ranks(launch.role)
    if size == 1:
        return None
    return Leader(size, partial(_be_rank, launch, on_fork), join_by(config.device, size))


def _be_rank(launch: Launch, on_fork: Callable[[str], None], ranks: Ranks, link: socket.socket) -> None:
    """Run one rank. The worker handles signals for the whole server, and ends its ranks."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name = f"{launch.worker_id}/{ranks.rank}"
    on_fork(name)
    set_up_worker_logging(launch.config, name)
    set_up_threads(launch.config)
    if launch.config.device == "cuda":
        torch.cuda.set_device(ranks.rank)
    build_kernels()
    follow(launch.config, ranks, link)


def end_process() -> None:
    """End this worker, which has lost a rank. The supervisor starts it again."""
    log.error("the worker ends with it")
    os._exit(1)
