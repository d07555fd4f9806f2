"""This process's NIXL agent: registered memory, peers' memory, and reads from peers' memory into ours.

Only NIXL's agent metadata is exchanged, as opaque bytes, together with plain integers. Each side makes its
own descriptor lists from these, since NIXL would serialize lists with pickle. NIXL's compiled bindings are
found without importing the Python package around them, which configures logging for the whole process and
closes all existing handlers.

Two properties of NIXL shape this module. First, the call that finds a peer lost forgets the peer, and with it
the remote keys that prepared lists point to: using such a list afterwards crashes the process. So every call
is made under one lock, and a lost `Remote` stays lost. Second, a running transfer cannot be cancelled.
Releasing it only forgets it, and its bytes are still written. So it is polled until it is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvtransfer.interface import RegisteredPool, TransferError
from protocol.errors import ProtocolError
from protocol.ports import ANY_PORT

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""The packages with NIXL for each platform and CUDA release; the package `nixl` only selects one."""


@functools.cache
def bindings() -> Any:
    """Return NIXL's module. Raises TransferError, with what to install, if none can be loaded."""
    reasons = []
    for package in _PACKAGES:
        try:
            module = _load(package)
        except (ImportError, OSError) as error:
            reasons.append(f"{package}: {error}")
            continue
        if module is not None:
            return module
    why = "; ".join(reasons) or f"none of {', '.join(_PACKAGES)} is installed"
    raise TransferError(
        f"the ucx transport needs NIXL 1.5 or later ({why}); "
        "install it with `pip install --no-deps nixl nixl-cu12`, or nixl-cu13 with CUDA 13"
    )


def _load(package: str) -> ModuleType | None:
    """Return the package's bindings, or None if it is not installed."""
    name = f"{package}._bindings"
    if name in sys.modules:
        return sys.modules[name]
    parent = importlib.util.find_spec(package)
    if parent is None or parent.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec(name, parent.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise ImportError("it has no bindings for this Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a later import of the package must find this module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@functools.cache
def preload_nixl() -> None:
    """Load NIXL's libraries, if installed, in the process that forks the workers."""
    with contextlib.suppress(TransferError):
        package = Path(bindings().__file__).parent
        for plugin in package.parent.glob(f"{package.name}.libs/**/libplugin_UCX.so"):
            with contextlib.suppress(OSError):  # NIXL reports the problem later
                ctypes.CDLL(str(plugin))


Indices = npt.NDArray[np.int32]

_PROGRESS_DELAY_US = 100_000
"""Longest sleep of NIXL's idle progress thread, in microseconds.

The thread polls UCX's event descriptor and wakes at once when data arrives, so this delays only transports
whose events UCX misses. NIXL's default of 0 never sleeps and costs a core.
"""

ENGINE_CONFIG = (
    "PROTO_EMULATION_ENABLE=n,CUDA_IPC_ENABLE_GET_ZCOPY=on,TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
)
"""UCX settings that differ from its defaults; the environment (`UCX_PROTO_EMULATION_ENABLE=y`) still wins.

On a wire without one-sided reads (plain TCP) UCX lets the peer's process answer a read, and in that code a
failed send is fatal: a reader that dies at the wrong moment takes the sender's process with it. So a pair
with plain TCP alone is refused, and our own `tcp` serves it. For users who force it, larger segments make
such reads at least as fast as writes; a receiver's must not be smaller than the sender's.

Between GPUs of one host without NVLink UCX leaves reads off by default, since they are slower than writes
there. Such a pair would be left with TCP, which passes through the host twice.
"""


@dataclass(frozen=True)
class Memory:
    """Memory of `num_blocks` blocks of `block_bytes` bytes, from `address` on, on the host or on a GPU."""

    address: int
    block_bytes: int
    num_blocks: int
    kind: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0

    @classmethod
    def of(cls, pool: RegisteredPool) -> Memory:
        if pool.device is None:
            address = int(np.frombuffer(pool.buffer, np.uint8).ctypes.data)
            return cls(address, pool.block_bytes, pool.num_blocks)
        assert isinstance(pool.device, Tensor)
        return cls.of_blocks(pool.device)

    @classmethod
    def of_blocks(cls, blocks: Tensor) -> Memory:
        """Return the memory of uint8 [num_blocks, block_bytes]."""
        device = blocks.device
        kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        return cls(blocks.data_ptr(), blocks.shape[1], blocks.shape[0], kind, device.index or 0)

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_blocks


def _errors_of(nixl: Any) -> tuple[type[Exception], ...]:
    """Return NIXL's exception classes: one for each status, without a common base."""
    kinds = [kind for kind in vars(nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (RuntimeError, *kinds)


class AgentClosedError(OSError):
    """The agent is closed; everything it held is released."""


@dataclass(eq=False)
class Remote:
    """Another agent, from `Agent.connect` to the last `Agent.disconnect`."""

    name: str
    metadata: bytes
    lost: bool = False
    users: int = 0
    in_flight: int = 0


@dataclass(eq=False)
class Transfer:
    """A started read. `is_over` is the latest result of `Agent.poll`."""

    handle: int
    remote: Remote
    is_over: bool = False


class Agent:
    """A NIXL agent, for use from every thread. Raises OSError for errors of NIXL.

    After `close`, releasing calls have no effect and all others raise AgentClosedError.

    No agent of the cluster may ever use `name` again. With `on_this_host` UCX listens on loopback only,
    otherwise on one of `ports` of each of the host's addresses.
    """

    def __init__(self, name: str, *, on_this_host: bool = False, ports: Sequence[int] = ANY_PORT) -> None:
        self.name = name
        self._nixl = bindings()
        self._errors = _errors_of(self._nixl)
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._transfers: set[Transfer] = set()
        self._users: dict[Memory, int] = {}
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = self._nixl.nixlAgent(name, config)
            parameters, _ = self._agent.getPluginParams("UCX")
            listen = ",NET_DEVICES=lo" if on_this_host else f",TCP_PORT_RANGE={ports[0]}-{ports[-1]}"
            engine_config = ENGINE_CONFIG + listen
            self._backend = self._agent.createBackend("UCX", {**parameters, "engine_config": engine_config})
        except self._errors as error:
            chosen = os.environ.get("UCX_TLS", "all")
            raise OSError(
                f"UCX does not work with UCX_TLS={chosen} ({error}); it needs tcp or RDMA among them, "
                "since shared memory alone does not notice a peer's death, and cuda on a host with a GPU of "
                "NVIDIA, since NIXL asks for it"
            ) from error

    def register(self, memory: Memory) -> None:
        """Let UCX use this memory. One `deregister` undoes one call."""
        with self._calling("cannot register memory") as agent:
            if not self._users.get(memory):
                agent.registerMem(self._region(memory), [self._backend])
            self._users[memory] = self._users.get(memory, 0) + 1

    def deregister(self, memory: Memory) -> None:
        with suppress(AgentClosedError), self._calling("cannot deregister memory") as agent:
            self._users[memory] -= 1
            if not self._users[memory]:
                del self._users[memory]
                agent.deregisterMem(self._region(memory), [self._backend])

    def metadata(self) -> bytes:
        """Return the metadata that other agents need to read the currently registered memory."""
        with self._calling("cannot describe this agent") as agent:
            return bytes(agent.getLocalMD())

    def connect(self, name: str, metadata: bytes) -> Remote:
        """Add another agent, without exchanging a byte yet. `disconnect` undoes this."""
        with self._calling(f"cannot use the metadata of {name}") as agent:
            remote = self._remotes.get(name)
            if remote is not None and remote.lost:
                if remote.in_flight:  # NIXL would report reads as failed while their bytes still arrive
                    raise ConnectionResetError(f"earlier reads from {name} are not over yet")
                agent.invalidateRemoteMD(name)
                remote = None
            if remote is None:
                loaded = bytes(agent.loadRemoteMD(metadata)).decode(errors="replace")
                if loaded != name:
                    raise ProtocolError(f"the metadata of {name} is that of {loaded}")
                remote = self._remotes[name] = Remote(name, metadata)
            elif remote.metadata != metadata:
                raise ProtocolError(f"{name} has changed its metadata")
            remote.users += 1
            return remote

    def disconnect(self, remote: Remote) -> None:
        with suppress(AgentClosedError), self._calling(f"cannot forget {remote.name}") as agent:
            remote.users -= 1
            if not remote.users and self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
                agent.invalidateRemoteMD(remote.name)

    def prepare(self, memory: Memory, remote: Remote | None = None) -> int:
        """Return a list of the blocks of our own or a remote memory, for `read`; `release` frees it."""
        blocks = [memory.address, memory.block_bytes, memory.device_id, memory.block_bytes, memory.num_blocks]
        owner = self._nixl.NIXL_INIT_AGENT if remote is None else remote.name
        with self._calling("cannot prepare a list of blocks") as agent:
            self._check(remote)
            strided = np.array([blocks], dtype=np.uint64)
            return int(agent.prepXferDlist(owner, self._segment(memory), strided, [self._backend]))

    def release(self, prepared: int) -> None:
        with suppress(AgentClosedError), self._calling("cannot release a list of blocks") as agent:
            agent.releasedDlistH(prepared)

    def read(self, remote: Remote, theirs: int, sources: Indices, ours: int, targets: Indices) -> Transfer:
        """Start to read the blocks `sources` of one prepared list into the blocks `targets` of another.

        NIXL itself merges blocks that are consecutive on both sides.
        """
        with self._calling(f"cannot read from {remote.name}") as agent:
            self._check(remote)
            operation = self._nixl.NIXL_READ
            handle = agent.makeXferReq(operation, ours, targets, theirs, sources, b"", [self._backend], False)
            transfer = Transfer(handle, remote)
            self._transfers.add(transfer)
            remote.in_flight += 1
            try:
                agent.postXferReq(handle)
            except self._errors as error:
                raise self._failed(transfer, error) from error
            return transfer

    def poll(self, transfer: Transfer) -> bool:
        """Return whether the transfer is over; never blocks. Raises ConnectionResetError if it has failed.

        A transfer that `is_over` writes nothing more.
        """
        with self._calling(f"cannot ask for a read from {transfer.remote.name}") as agent:
            if transfer.is_over:
                return True
            try:
                if agent.getXferStatus(transfer.handle) == self._nixl.NIXL_IN_PROG:
                    return False
            except self._errors as error:
                raise self._failed(transfer, error) from error
            self._forget(transfer)
            return True

    def close(self) -> None:
        """End all transfers, connections and threads of the agent, which then writes nothing. Idempotent."""
        with self._lock:
            if self._agent is None:
                return
            for transfer in list(self._transfers):
                self._forget(transfer)
            self._agent = None  # its destructor closes the connections, joins the threads, unpins the memory

    def _failed(self, transfer: Transfer, error: Exception) -> ConnectionResetError:
        transfer.remote.lost = True
        self._forget(transfer)
        return ConnectionResetError(f"reading from {transfer.remote.name} failed: {error}")

    def _forget(self, transfer: Transfer) -> None:
        transfer.is_over = True
        transfer.remote.in_flight -= 1
        self._transfers.discard(transfer)
        self._agent.releaseXferReq(transfer.handle)

    def _check(self, remote: Remote | None) -> None:
        if remote is not None and remote.lost:
            raise ConnectionResetError(f"the connection to {remote.name} is lost")

    def _segment(self, memory: Memory) -> Any:
        return self._nixl.DRAM_SEG if memory.kind == "cpu" else self._nixl.VRAM_SEG

    def _region(self, memory: Memory) -> Any:
        extent = (memory.address, memory.nbytes, memory.device_id, "")
        return self._nixl.nixlRegDList(self._segment(memory), [extent])

    @contextmanager
    def _calling(self, trouble: str) -> Iterator[Any]:
        with self._lock:
            if self._agent is None:
                raise AgentClosedError("the ucx transport is closed")
            try:
                yield self._agent
            except self._errors as error:
                raise OSError(f"NIXL: {trouble}: {error}") from error
