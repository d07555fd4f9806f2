"""Makes the tiers that the configuration asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from engine.kv.pool import KVPool
from engine.kv.tiers.disk import DiskTier
from engine.kv.tiers.host import MIN_SLOTS_WITH_DISK, HostMemory, HostTier
from engine.kv.tiers.slot_file import ENTRY_BYTES, SlotFile, check_free_space, claim_folder
from protocol.config import ServeConfig
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")


def build_tiers(
    config: ServeConfig, pool: KVPool, fingerprint: bytes, on_fetched: Callable[[], None]
) -> HostTier | None:
    """None when no tier is asked for. Raises `ConfigError`, naming the flag.

    The disk has KV of the model with this `fingerprint` (16 bytes). `on_fetched` is called in another thread
    when blocks have come from there.
    """
    if config.kv_offloading_size == 0:
        return None
    memory = HostMemory(pool.memory, _host_slots(config, pool))
    if config.kv_disk_path is None:
        return HostTier(memory)
    if not hasattr(os, "posix_fallocate"):
        raise ConfigError("--kv-disk-path: this operating system cannot allocate room in a file")
    file = _open_file(config, Path(config.kv_disk_path), memory.block_bytes, fingerprint)
    return HostTier(memory, DiskTier(file, memory.buffer, on_fetched))


def _host_slots(config: ServeConfig, pool: KVPool) -> int:
    block_bytes = pool.memory.shape[1]
    nbytes = _gib(config.kv_offloading_size)
    num_slots = nbytes // block_bytes
    least = MIN_SLOTS_WITH_DISK if config.kv_disk_path is not None else 1
    if num_slots < least:
        raise ConfigError(
            f"--kv-offloading-size: {config.kv_offloading_size:g} GiB hold {num_slots} blocks of "
            f"{block_bytes} bytes; at least {least} are needed"
        )
    available = psutil.virtual_memory().available - (0 if pool.is_cuda else pool.num_bytes)
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
