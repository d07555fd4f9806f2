"""The paged KV pool: one block-major piece of memory, and the choice of its size."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.copies import host_zeros, upload_to
from engine.kv.attention import LayerKv
from engine.kv.layout import LayerPlace, LayerShape, PoolLayout
from engine.kv.row_codes import StoredRows
from engine.kv.state_slots import StateMemory, StateSlots
from engine.limits import cpu_pool_budget
from protocol.config import ServeConfig
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")

Allocate = Callable[[int], memoryview]


class KVPool:
    """The memory of all blocks. A block is its segments one after the other, so the whole is one extent.

    `memory` is uint8 [num_blocks, bytes of a block]. A segment is a view [num_blocks, num_layers, num_planes,
    block_size, num_kv_heads, head_dim]; values of coded rows are bytes, followed by scales (`Segment.views`).
    """

    def __init__(
        self, layout: PoolLayout, num_blocks: int, device: torch.device, allocate: Allocate | None
    ) -> None:
        self.block_size = layout.block_size
        self.num_blocks = num_blocks
        self.segments = layout.describe()
        self.groups = {group.name: group for group in layout.groups}
        self.num_tables = len(layout.windows)
        """Number of block tables of a sequence. A token has a slot in a block of each table."""
        self.state_blocks = layout.state_blocks
        self.state_unit = layout.state_unit
        self.state_slots, self.draft_state_slots = (
            StateSlots(state, layout.num_state_slots, device) if state is not None else None
            for state in (layout.state, layout.draft_state)
        )
        """State slots of running sequences, for the model and for the draft model."""
        self._upload = upload_to(device)
        total = num_blocks * layout.block_bytes
        if device.type != "cpu":
            memory = torch.zeros(total, dtype=torch.uint8, device=device)
        elif allocate is not None:
            memory = torch.frombuffer(allocate(total), dtype=torch.uint8)
        else:
            memory = host_zeros(total)
        self.memory = memory.view(num_blocks, layout.block_bytes)
        self.state_memory: StateMemory = self.memory
        """The blocks in which states are kept."""
        self._segments = layout.views(self.memory)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a block, on all ranks."""
        return self.memory.shape[1]

    @property
    def token_bytes(self) -> int:
        """Number of bytes of one token's KV in all tables."""
        return self.num_tables * self.num_bytes // (self.num_blocks * self.block_size)

    @property
    def is_cuda(self) -> bool:
        return self.memory.is_cuda

    def segment(self, name: str) -> Tensor:
        return self._segments[name].values

    def layers(self, group: str) -> list[LayerKv]:
        of = self.groups[group]

        def view(segment: int, index: int) -> StoredRows:
            return self._segments[of.segment_name(segment)].part(slice(None), index)

        def layer(place: LayerPlace) -> LayerKv:
            own = view(place.segment, place.index)
            keys = own.values[:, 0]
            if place.shape is not None:
                return _in_rows(keys[:, :, 0], place.first, place.shape)
            if place.value_dim is not None:
                return LayerKv(keys, keys[..., : place.value_dim])
            if place.value_segment is None:
                return LayerKv.of(*own)
            sides = own, view(place.value_segment, place.index)
            return LayerKv.of_sides(*(side.part(slice(None), 0) for side in sides))

        return [layer(place) for place in of.layers]

    def copy_block(self, source: int, target: int) -> None:
        self.memory[target].copy_(self.memory[source])

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None:
        """Move a sequence's KV at place `first + places[i]` to `first + i`."""
        moves = [[first + place for place in places], [*range(first, first + len(places))]]
        for block_ids in tables:
            blocks = [[block_ids[place // self.block_size] for place in side] for side in moves]
            (sources, targets), (source_offsets, target_offsets) = self._upload(
                [np.array(blocks, np.int64), np.array(moves, np.int64) % self.block_size]
            )
            for values, scales in self._segments.values():
                values[targets, :, :, target_offsets] = values[sources, :, :, source_offsets]
                if scales is not None:
                    scales[targets, :, :, target_offsets] = scales[sources, :, :, source_offsets]


def _in_rows(rows: Tensor, first: int, shape: LayerShape) -> LayerKv:
    """Return a layer's part of rows [num_blocks, block_size, values]."""
    sizes = [shape.num_kv_heads * dim for dim in (shape.key_dim, shape.value_dim)]
    keys, values = rows[..., first : first + sum(sizes)].split(sizes, dim=-1)
    return LayerKv(
        keys.unflatten(-1, (shape.num_kv_heads, shape.key_dim)),
        values.unflatten(-1, (shape.num_kv_heads, shape.value_dim)),
    )


def pool_blocks(
    config: ServeConfig,
    layout: PoolLayout,
    device: torch.device,
    max_model_len: int,
    kept_free: int,
    window_spans: Sequence[int | None] = (None,),
) -> int:
    """Return how many blocks fit, with `kept_free` bytes of a GPU left for other uses. `window_spans` has the
    most tokens of a sequence that each table holds at a time; None: all. Raise `ConfigError` if not even one
    sequence of `max_model_len` tokens fits.
    """
    nbytes = layout.block_bytes
    kept = [min(span or max_model_len, max_model_len) for span in window_spans]
    what = f"--max-model-len ({max_model_len})"
    if max(kept) < max_model_len:
        what = f"the window and step of a sequence ({max(kept)})"
    # One more than the tokens take: a prompt that is fully cached continues in a copy of its last block.
    per_sequence = sum(math.ceil(most / config.block_size) + 1 for most in kept) + layout.state_blocks
    state_slot_bytes = layout.state_slot_bytes
    budget, reason = _pool_budget(
        config, device, max_model_len, per_sequence * nbytes + state_slot_bytes, kept_free
    )
    if state_slot_bytes and layout.state_slots_bytes > budget - per_sequence * nbytes:
        fitting = max(0, budget - per_sequence * nbytes) // state_slot_bytes
        raise ConfigError(
            f"--max-num-seqs: {layout.num_state_slots} sequences' states of {state_slot_bytes} bytes each "
            f"do not fit in {budget} bytes ({reason}) next to "
            f"{per_sequence * nbytes} bytes of KV for one sequence of "
            f"--max-model-len ({max_model_len}); {fitting} fit"
        )
    budget -= layout.state_slots_bytes
    num_blocks = budget // nbytes
    if num_blocks < per_sequence:
        raise ConfigError(
            f"--kv-cache-memory-bytes: a KV pool of {budget} bytes ({reason}) holds "
            f"{num_blocks * config.block_size // len(kept)} tokens, fewer than {what}, "
            f"which needs {per_sequence * nbytes} bytes"
        )
    pool = f"{num_blocks} blocks of {config.block_size} tokens, {num_blocks * nbytes / 2**20:.0f} MiB"
    logger.debug("KV pool: %s (%s)", pool, reason)
    return num_blocks


def _pool_budget(
    config: ServeConfig, device: torch.device, max_model_len: int, sequence_bytes: int, kept_free: int
) -> tuple[int, str]:
    """Return the pool's bytes and the reason; `sequence_bytes`: the bytes of one longest sequence."""
    if config.kv_cache_memory_bytes is None and device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed
        free, total = torch.cuda.mem_get_info(device)
        own_share = int(total * config.gpu_memory_utilization) - torch.cuda.memory_reserved(device)
        share = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
        steps = f"{kept_free >> 20} MiB for its steps and graphs"
        reason = f"{share}, less what this worker uses already and {steps}"
        return max(0, min(own_share, free) - kept_free), reason
    return cpu_pool_budget(config, max_model_len, sequence_bytes)
