"""A host's GPUs and CPU threads: whether it has GPUs (found without importing torch), how its workers share
them, and whether a worker can have several ranks.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.config import ServeConfig, flag_name
from protocol.errors import ConfigError
from protocol.roles import ROLES
from protocol.speculation import SELF

WORKERS_PER_CORE = 4
"""The most workers per core of a CPU node without roles, since each has threads and memory."""
_HEADS = ("num_attention_heads", "n_head")
"""Fields of a `config.json` with the number of attention heads."""


def check_ranks(config: ServeConfig) -> None:
    """Raise `ConfigError`, with option, value and limit, if another option excludes ranks."""
    if "object_store" in config.transport_names:
        refuse_ranks(
            config, "with object_store among --kv-transports: it needs workers within Ray's processes"
        )
    if config.compile == "on":
        refuse_ranks(config, "with --compile on: torch.compile knows nothing of what ranks exchange")


def check_number(config: ServeConfig, cores: int) -> None:
    """Raise `ConfigError` if the workers are more than a host with so many cores, and no GPU, can take."""
    most, wanted = WORKERS_PER_CORE * cores, config.total_ranks
    if wanted > most:
        largest = max(ROLES.values(), key=lambda role: config.num_replicas(role) * config.num_ranks(role))
        has_more_ranks = config.num_ranks(largest) > config.num_replicas(largest)
        flag = flag_name(largest.ranks if has_more_ranks else largest.replicas)
        raise ConfigError(
            f"{flag}: at most {most} worker processes fit on this host with {cores} "
            f"cores and no GPU ({WORKERS_PER_CORE} for each core), got {wanted} of all roles"
        )


def check_heads(config: ServeConfig, decoder: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the ranks do not divide the attention heads in the decoder's `config.json`."""
    for flag, size in _sizes(config):
        for field in _HEADS:
            count = decoder.get(field)
            if isinstance(count, int) and count % size:
                raise ConfigError(f"{flag}: {size} does not divide {field} of {config.model}, {count}")


def check_gpu_ranks(config: ServeConfig, num_gpus: float, ranks: int) -> None:
    """Raise `ConfigError` if a node has too few GPUs for `ranks`, or another option excludes GPU ranks."""
    options = config.speculative_config
    reasons = {
        f"on {num_gpus:g} GPUs of a node for {ranks} ranks, which take a GPU each": ranks > num_gpus,
        "with --kv-disk-path on GPUs": config.kv_disk_path is not None,
        f"with --compile {config.compile} on GPUs": config.compile != "auto",
        f"with method {SELF} on GPUs, whose draft runs layers that are divided": options is not None
        and options.method == SELF,
    }
    for why, excludes in reasons.items():
        if excludes:
            refuse_ranks(config, why)


def refuse_ranks(config: ServeConfig, why: str) -> None:
    """Raise `ConfigError` if any worker is to have several ranks."""
    for flag, size in _sizes(config):
        raise ConfigError(f"{flag}: {size} is above 1, which cannot be {why}")


def _sizes(config: ServeConfig) -> Iterator[tuple[str, int]]:
    for role in ROLES.values():
        if config.num_replicas(role) and config.num_ranks(role) > 1:
            yield flag_name(role.ranks), config.num_ranks(role)


log = logging.getLogger(__name__)

CACHED_PRODUCTS = 384
"""The number of compiled matrix products in each cache: 64 row counts for a decoder's six weight shapes. Each
product takes 0.5 to 2 MB. oneDNN and torch would cache 1,024 each.
"""


def choose_threads(config: ServeConfig, cores: int, ranks: int | None = None) -> tuple[int, str]:
    """Return the CPU threads per rank on the host (`ranks` default: all workers' ranks), and the reason.

    `--worker-threads` wins. Otherwise the ranks share the host's cores evenly, with at least one each. More
    threads than cores would cost speed: a step is a sequence of parallel regions, each of which waits for its
    slowest thread.
    """
    if config.worker_threads is not None:
        return config.worker_threads, "--worker-threads"
    ranks = ranks or config.total_ranks
    kind = "rank" if config.has_ranks else "worker"
    return max(1, cores // ranks), f"{cores} cores for {ranks} {kind}{'s' * (ranks > 1)}"


_RAY_UNITS = 10_000
"""Ray counts resources in units of 1/10,000. A share that is rounded up would not fit n times."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment of a host's template, which its workers inherit.

    Threads spin for a while before they sleep, because waking one costs more than the work between two
    barriers of a small model's step. A much longer spin would keep the cores from the router and clients.
    Huge pages let a core read weights faster (they save about a tenth of a step for a model of 29 M
    parameters). NumPy must not start threads when it is imported, since a template must have only one. oneDNN
    compiles a product for each number of rows; the two cache capacities limit their memory.
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
    """Return the GPUs per rank: 1, 0 on a CPU, or 1/n if n workers must share a GPU.

    A worker's share is on one GPU, so n is rounded up to a whole number. Tensor-parallel ranks share no GPU.
    """
    if config.device == "cpu":
        return 0.0
    if num_gpus == 0:
        if config.device == "cuda":
            raise ConfigError("--device: cuda was asked for, but Ray finds no GPU")
        return 0.0
    if config.has_ranks:
        return 1.0
    sharing = math.ceil(workers / num_gpus)
    return math.floor(_RAY_UNITS / sharing) / _RAY_UNITS


def plan_workers(
    config: ServeConfig, num_gpus: float, cores: int, workers: int | None = None, ranks: int | None = None
) -> tuple[ServeConfig, float]:
    """Return the configuration of the workers on a host (default: all), and each rank's share of a GPU.

    Chooses the threads for their `ranks`, and divides the memory of the host or of a shared GPU. Raises
    `ConfigError`.
    """
    ranks = ranks or workers
    workers = workers or config.num_workers
    gpus = gpu_share(config, num_gpus, workers)
    if gpus > 0:
        check_gpu_ranks(config, num_gpus, ranks or config.total_ranks)
    planned = replace(
        config,
        device="cuda" if gpus > 0 else "cpu",
        gpu_memory_utilization=config.gpu_memory_utilization * (gpus or 1 / workers),
        worker_threads=choose_threads(config, cores, ranks)[0],
    )
    return planned, gpus


_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman put into containers."""


def may_use_gpu(config: ServeConfig) -> bool:
    """Return whether workers on this host may run on a GPU, as far as can be known without torch."""
    return config.device != "cpu" and not cuda_fault()


def runs_on_cpus(config: ServeConfig) -> bool:
    """Return whether surely all workers run on CPUs. Other nodes of a Ray cluster may have GPUs that this one
    lacks, but they have the same PyTorch.
    """
    if config.device != "auto":
        return config.device == "cpu"
    return bool(cuda_fault()) if config.ray_address is None else not has_cuda_build()


def in_container() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(mark).exists() for mark in _CONTAINER_MARKS)


def has_cuda_build() -> bool:
    """Return whether PyTorch is built for CUDA, without importing it."""
    spec = find_spec("torch")
    return spec is not None and Path(spec.origin or "").with_name("lib").joinpath("libtorch_cuda.so").exists()


def cuda_fault() -> str:
    """Return why no GPU can be used here, or "" if no obstacle can be found without torch."""
    if version("torch").endswith("+cpu"):
        return f"PyTorch {version('torch')} is built without CUDA: deploy/install.sh installs the other one"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this host has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "the NVIDIA driver finds no GPU" + (
            f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        )
    return ""
