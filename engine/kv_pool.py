"""The paged KV pool: one piece of memory, block-major, and how large to make it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.handoff import SegmentInfo

logger = logging.getLogger("tandem.engine")

CPU_POOL_LIMIT = 4 * 1024**3
"""Bytes of a CPU pool unless the user asks for more: larger ones only help the prefix cache."""

Allocate = Callable[[int], memoryview]


@dataclass(frozen=True)
class KVShape:
    """What the KV of one token looks like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, block_size, self.num_kv_heads, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)) * self.dtype.itemsize

    def describe(self, block_size: int) -> str:
        """Names the format, so that unlike KV never shares an identity."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}/{self.num_layers}x{self.num_kv_heads}x{self.head_dim}/{block_size}"


TARGET, DRAFT = "target", "draft"


class KVPool:
    """A block is its segments one after the other, so all of it is one extent.

    `blocks` are the bytes, uint8 [num_blocks, block_bytes]. `tensor` is the target's segment, and
    `segment(name)` any: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], each block
    contiguous.
    """

    def __init__(
        self,
        shapes: Mapping[str, KVShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        allocate: Allocate | None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(shapes, block_size)
        nbytes = num_blocks * self.block_bytes
        if allocate is not None and device.type == "cpu":
            memory = torch.frombuffer(allocate(nbytes), dtype=torch.uint8)
        else:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.blocks = memory.view(num_blocks, self.block_bytes)
        self._segments: dict[str, Tensor] = {}
        start = 0
        for name, shape in shapes.items():
            end = start + shape.block_bytes(block_size)
            values = self.blocks[:, start:end].view(shape.dtype)
            self._segments[name] = values.unflatten(1, shape.block_shape(block_size))
            start = end
        self.tensor = self._segments[TARGET]
        self.segments = [
            SegmentInfo(
                name=name,
                dtype=str(shape.dtype).removeprefix("torch."),
                shape=shape.block_shape(block_size),
            )
            for name, shape in shapes.items()
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def segment(self, name: str) -> Tensor:
        return self._segments[name]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, source to target, within the pool."""
        for source, target in copies:
            self.blocks[target].copy_(self.blocks[source])

    def move_tokens(self, block_ids: Sequence[int], first: int, places: Sequence[int]) -> None:
        """Of one sequence: move the KV at place `first + places[i]` to `first + i`."""
        if all(place == i for i, place in enumerate(places)):
            return
        sources, source_offsets = self._slots(block_ids, [first + place for place in places])
        targets, target_offsets = self._slots(block_ids, range(first, first + len(places)))
        for values in self._segments.values():
            values[targets, :, :, target_offsets] = values[sources, :, :, source_offsets]

    def _slots(self, block_ids: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The places' blocks, and their offsets in these."""
        size, device = self.block_size, self.blocks.device
        blocks = [block_ids[place // size] for place in places]
        offsets = [place % size for place in places]
        return torch.tensor(blocks, device=device), torch.tensor(offsets, device=device)


def block_bytes(shapes: Mapping[str, KVShape], block_size: int) -> int:
    return sum(shape.block_bytes(block_size) for shape in shapes.values())


def pool_blocks(
    config: ServeConfig, shapes: Mapping[str, KVShape], device: torch.device, max_model_len: int
) -> int:
    """How many blocks fit. Raises `ConfigError` when not even one sequence of `max_model_len` does."""
    nbytes = block_bytes(shapes, config.block_size)
    budget, reason = _pool_budget(config, device)
    num_blocks = budget // nbytes
    # One more than its tokens take: a prompt found whole in the cache goes on in a copy of its last block.
    per_sequence = math.ceil(max_model_len / config.block_size) + 1
    if num_blocks < per_sequence:
        raise ConfigError(
            f"--kv-cache-memory-bytes: a KV pool of {budget} bytes ({reason}) holds "
            f"{num_blocks * config.block_size} tokens, fewer than --max-model-len ({max_model_len}), "
            f"which needs {per_sequence * nbytes} bytes"
        )
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB (%s)",
        num_blocks,
        config.block_size,
        num_blocks * nbytes / 2**30,
        reason,
    )
    return num_blocks


def _pool_budget(config: ServeConfig, device: torch.device) -> tuple[int, str]:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    share = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization))), share
    workers = config.decode_replicas + (config.prefill_replicas if config.disaggregation else 0)
    fair = int(psutil.virtual_memory().available * config.gpu_memory_utilization / (2 * workers))
    if fair <= CPU_POOL_LIMIT:
        return fair, f"half of {share} of the free memory, over {workers} workers"
    return CPU_POOL_LIMIT, "the default on a CPU"
