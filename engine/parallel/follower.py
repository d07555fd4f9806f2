"""The loop of all ranks except rank 0: load the model, get a KV pool, run rank 0's commands."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from engine.batch.runner import Step
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.kv.tiers.host import HostMemory
from engine.load.select import load_packed
from engine.lora.config import AdapterError
from engine.parallel import messages
from engine.parallel.group import LostRankError, Ranks
from engine.parallel.messages import (
    READY,
    AdapterKept,
    BuildRunners,
    KeepAdapter,
    RankCall,
    RunStep,
    receive,
)
from engine.parallel.pools import lend_pool, rank_layout, share_state
from engine.parallel.runner import ShareRunner, share_of
from protocol.config import ServeConfig
from protocol.handoff import WINDOWED


def follow(config: ServeConfig, ranks: Ranks, link: socket.socket) -> None:
    """Run as another rank until rank 0 is gone. Raises the engine's errors for models that it can't serve."""
    loaded = share_of(config, load_packed(config, on_host=not ranks.shares_memory), ranks)
    memory = _map_pool(link) if ranks.shares_memory else None
    if (ranks.shares_memory and memory is None) or (begin := receive(link, messages.begin)) is None:
        return
    layout = _layout(loaded, begin, config.block_size, config.max_num_seqs)
    if memory is None:
        own = rank_layout(layout, ranks.size, ranks.rank)
        pool = lend_pool(own, begin.num_blocks, loaded.device, link)
    else:
        pool = KVPool(layout, begin.num_blocks, loaded.device, lambda _: memoryview(memory))
    runner = ShareRunner(config, loaded, pool, ranks, begin.hidden_layers)
    link.sendall(READY)
    try:
        _obey(loaded, pool, runner, ranks, link)
    except LostRankError:
        if receive(link, messages.to_others) is not None:
            raise  # rank 0 still runs: another rank is lost


def _obey(loaded: LoadedModel, pool: KVPool, runner: ShareRunner, ranks: Ranks, link: socket.socket) -> None:
    """Run rank 0's commands until it is gone."""
    functions = _functions(loaded, pool, runner, ranks, link)
    while (message := receive(link, messages.to_others)) is not None:
        match message:
            case RunStep(batch, logit_rows, wants_hidden):
                runner.run(Step(batch, logit_rows, wants_hidden))
            case KeepAdapter():
                messages.send(link, messages.encode(_keep(loaded, message)))
            case RankCall(name, arguments):
                functions[name](*arguments)


def _functions(
    loaded: LoadedModel, pool: KVPool, runner: ShareRunner, ranks: Ranks, link: socket.socket
) -> dict[str, Callable[..., object]]:
    """Return the functions that rank 0 calls by name. They have the arguments of its own objects' methods."""

    def allocate_slots(count: int) -> None:
        host = HostMemory(pool.memory, count)
        functions.update(save=host.save, load=host.load)

    def finish_copies() -> None:
        if pool.memory.is_cuda:
            torch.cuda.current_stream(pool.memory.device).synchronize()
        link.sendall(READY)

    functions: dict[str, Callable[..., object]] = {
        "warm_up": lambda: runner.warm_up(),
        "copy_block": pool.copy_block,
        "move_tokens": pool.move_tokens,
        "allocate_slots": allocate_slots,
        "finish_copies": finish_copies,
    }
    if loaded.adapters is not None:
        functions["drop_adapter"] = loaded.adapters.drop
    if pool.state_slots is not None:
        functions["load_state"] = partial(share_state, ranks, pool.state_slots)
        functions["move_inputs"] = pool.state_slots.move
    return functions


def _keep(loaded: LoadedModel, message: KeepAdapter) -> AdapterKept:
    assert loaded.adapters is not None
    try:
        loaded.adapters.keep(message.slot, message.path, message.raw)
    except AdapterError as error:
        return AdapterKept(str(error))
    return AdapterKept("")


def _map_pool(link: socket.socket) -> mmap.mmap | None:
    """Map the pool whose file `Leader.lend` sends. Returns None if rank 0 is gone."""
    memory = messages.receive_mapping(link)
    if memory is not None:
        link.sendall(READY)
    return memory


def _layout(loaded: LoadedModel, begin: BuildRunners, block_size: int, num_slots: int) -> PoolLayout:
    is_windowed = any(info.kind == WINDOWED for info in begin.segments)
    groups = [loaded.kv_group.in_tables(loaded.max_model_len) if is_windowed else loaded.kv_group]
    for info in begin.segments:
        if not info.name.startswith(TARGET):
            layers, planes, _, heads, size = info.shape
            segment = Segment(
                layers, heads, size, getattr(torch, info.dtype), planes, quantization=info.quantization
            )
            groups.append(Group.uniform(info.name, segment))
    state = None
    if loaded.recurrent is not None:
        state = replace(loaded.recurrent.state, window=begin.state_window)
    return PoolLayout(tuple(groups), block_size, state, num_slots)
