"""What each worker gets of its host: GPUs and CPU threads."""

from __future__ import annotations

import os

import msgspec

from protocol.config import ServeConfig
from protocol.errors import ConfigError


def worker_count(config: ServeConfig) -> int:
    return config.decode_replicas + (config.prefill_replicas if config.disaggregation else 0)


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def choose_threads(config: ServeConfig, cores: int) -> tuple[int, str]:
    """CPU threads for one worker, and why.

    `--worker-threads` wins. Otherwise the host's cores are divided evenly among the workers, at least one
    each: a step is one parallel region after another, and every region waits for its slowest thread, so
    threads that outnumber the cores cost more than they bring.
    """
    if config.worker_threads is not None:
        return config.worker_threads, "--worker-threads"
    workers = worker_count(config)
    return max(1, cores // workers), f"{cores} cores for {workers} workers"


def thread_environment(threads: int, workers: int, cores: int) -> dict[str, str]:
    """Environment of a worker process on a CPU.

    Threads that outnumber the cores must not spin while they wait for one another.
    """
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if threads * workers > cores:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return environment


def gpu_share(config: ServeConfig, num_gpus: float) -> float:
    """GPUs for one worker: one, or an equal part where there are fewer GPUs than workers; 0 on a CPU."""
    if config.device == "cpu":
        return 0.0
    if num_gpus == 0:
        if config.device == "cuda":
            raise ConfigError("--device: cuda was asked for, but Ray finds no GPU")
        return 0.0
    return min(1.0, num_gpus / worker_count(config))


def worker_config(config: ServeConfig, gpus: float, cores: int) -> ServeConfig:
    """The configuration as one worker gets it: threads chosen, a shared GPU's memory divided."""
    device = "cuda" if gpus > 0 else "cpu"
    memory = config.gpu_memory_utilization * (gpus if 0 < gpus < 1 else 1.0)
    threads, _ = choose_threads(config, cores)
    return msgspec.structs.replace(
        config, device=device, gpu_memory_utilization=memory, worker_threads=threads
    )
