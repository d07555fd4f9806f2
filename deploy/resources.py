"""What each worker gets of its host: GPUs and CPU threads."""

from __future__ import annotations

import logging

import msgspec

from deploy.tensor_parallel import refuse_ranks
from protocol.config import ServeConfig
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

CACHED_PRODUCTS = 384
"""Compiled matrix products: for 64 numbers of rows, of a decoder's six shapes of weights. They take 0.5 to
2 MB each, and oneDNN and torch keep 1,024 each by default."""


def choose_threads(config: ServeConfig, cores: int, ranks: int | None = None) -> tuple[int, str]:
    """CPU threads for each of the `ranks` of a host's workers (of all that are deployed), and why.

    `--worker-threads` wins. Otherwise the host's cores are divided evenly among the ranks, at least one each:
    a step is one parallel region after another, and every region waits for its slowest thread, so threads
    that outnumber the cores cost more than they bring.
    """
    if config.worker_threads is not None:
        return config.worker_threads, "--worker-threads"
    ranks = ranks or config.total_ranks
    kind = "workers" if config.total_ranks == config.num_workers else "ranks"
    return max(1, cores // ranks), f"{cores} cores for {ranks} {kind}"


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a host's template, and so of its workers.

    Waking a sleeping thread costs more than the work between two barriers of a small model's step, so threads
    spin for a while before they sleep; much longer, they would keep the cores from the router and clients.
    Huge pages let a core read weights faster (about a tenth of a step for a model of 29 M parameters).
    NumPy would start threads when it is imported; a template must have one thread.
    oneDNN compiles a product for each number of rows. Both caches of those are bounded: what either one keeps
    stays in memory.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TOKENIZERS_PARALLELISM": "false",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_PRODUCTS),
        "LRU_CACHE_CAPACITY": str(CACHED_PRODUCTS),
    }


def gpu_share(config: ServeConfig, num_gpus: float, workers: int) -> float:
    """GPUs for one worker: one, or an equal part where there are fewer GPUs than workers; 0 on a CPU."""
    if config.device == "cpu":
        return 0.0
    if num_gpus == 0:
        if config.device == "cuda":
            raise ConfigError("--device: cuda was asked for, but Ray finds no GPU")
        return 0.0
    return min(1.0, num_gpus / workers)


def plan_workers(
    config: ServeConfig,
    num_gpus: float,
    cores: int,
    workers: int | None = None,
    ranks: int | None = None,
) -> tuple[ServeConfig, float]:
    """The configuration that a host's `workers` (all that are deployed) get, and each one's share of a GPU.

    Threads of their `ranks` are chosen; the memory of the host, or of a shared GPU, is divided. Raises
    ConfigError.
    """
    ranks = ranks or workers
    workers = workers or config.num_workers
    gpus = gpu_share(config, num_gpus, workers)
    if gpus > 0:
        refuse_ranks(config, "on a GPU; with --device cpu they can")
    planned = msgspec.structs.replace(
        config,
        device="cuda" if gpus > 0 else "cpu",
        gpu_memory_utilization=config.gpu_memory_utilization * (gpus or 1 / workers),
        worker_threads=choose_threads(config, cores, ranks)[0],
    )
    return planned, gpus
