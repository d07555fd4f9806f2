"""`ucx` compared with NIXL itself: bare reads and writes of the same blocks, each as one request.

All take turns in the same pair of processes, with several choices of UCX's transports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.transfer.process import ProcessObject
from bench.transfer.raw import MODEL_BLOCK, SMALL_BLOCK, TOTAL_BYTES
from bench.transfer.row import TransferRow, ratio_row
from bench.transfer.sides import Pair, ReceivingSide, SendingSide, Side, scattered
from kvtransfer.transports.ucx_agent import ENGINE_CONFIG, bindings

TLS = ("tcp", "cma,tcp")
_POLL_S = 0.0002


class BareAgent(Side):
    """A side with a NIXL agent over its pool, in addition to the transport's own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        nixl = self._nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, 50_000
        self._agent = nixl.nixlAgent(f"bare-{self.name}", config)
        parameters, _ = self._agent.getPluginParams("UCX")
        self._backend = self._agent.createBackend("UCX", {**parameters, "engine_config": ENGINE_CONFIG})
        region = nixl.nixlRegDList(nixl.DRAM_SEG, [(self.address, self.pool.nbytes, 0, "")])
        self._agent.registerMem(region, [self._backend])

    def introduction(self) -> tuple[bytes, int]:
        """Return the metadata and the pool's address, which the other agent needs."""
        return self._agent.getLocalMD(), self.address

    def meet_agent(self, metadata: bytes, address: int) -> None:
        name = self._agent.loadRemoteMD(metadata)
        self._ours = self._prepare(self._nixl.NIXL_INIT_AGENT, self.address)
        self._theirs = self._prepare(name, address)

    def _prepare(self, owner: str | bytes, address: int) -> int:
        pool = self.pool
        blocks = np.array(
            [[address, pool.block_bytes, 0, pool.block_bytes, pool.num_blocks]], dtype=np.uint64
        )
        return int(self._agent.prepXferDlist(owner, self._nixl.DRAM_SEG, blocks, [self._backend]))

    def move(self, operation: str, here: Sequence[int], there: Sequence[int]) -> float:
        """Move all blocks in one request. Return the seconds."""
        started = time.perf_counter()
        request = self._agent.makeXferReq(
            getattr(self._nixl, operation),
            self._ours,
            np.asarray(here, dtype=np.int32),
            self._theirs,
            np.asarray(there, dtype=np.int32),
            b"",
            [self._backend],
            False,
        )
        status = self._agent.postXferReq(request)
        while status == self._nixl.NIXL_IN_PROG:
            time.sleep(_POLL_S)
            status = self._agent.getXferStatus(request)
        self._agent.releaseXferReq(request)
        return time.perf_counter() - started


class NixlReceiving(BareAgent, ReceivingSide):
    pass


class NixlSending(BareAgent, SendingSide):
    pass


class NixlPair(Pair):
    def __init__(self, tls: str, block_bytes: int) -> None:
        environment = {"UCX_TLS": tls, "UCX_PROTO_EMULATION_ENABLE": "y"}  # plain TCP is measured, too
        super().__init__(
            ["ucx"],
            block_bytes,
            TOTAL_BYTES // block_bytes,
            receiving=NixlReceiving,
            sending=NixlSending,
            start=partial(ProcessObject, environment=environment),
        )
        for one, other in ((self.sender, self.receiver), (self.receiver, self.sender)):
            one.call("meet_agent", *other.call("introduction"))
        self._order = scattered(self.num_blocks)

    def read(self) -> float:
        return float(self.receiver.call("move", "NIXL_READ", range(self.num_blocks), self._order))

    def write(self) -> float:
        return float(self.sender.call("move", "NIXL_WRITE", self._order, range(self.num_blocks)))

    def ours(self) -> float:
        return self.move("ucx", self._order).seconds


def ucx(repeats: int) -> Iterator[TransferRow]:
    for tls in TLS:
        for block_bytes in (MODEL_BLOCK, SMALL_BLOCK):
            with NixlPair(tls, block_bytes) as pair:
                rounds = [(pair.read(), pair.write(), pair.ours()) for _ in range(repeats + 1)][1:]
            size = f"{block_bytes / 1024:.0f} KiB"
            nbytes = pair.num_blocks * block_bytes
            columns = {"read": 0, "write": 1}
            best = min(columns, key=lambda way: sorted(row[columns[way]] for row in rounds)[repeats // 2])
            compared = [(row[columns[best]], row[2]) for row in rounds]
            what = f"ucx, UCX_TLS={tls}, blocks of {size}"
            yield ratio_row(what, compared, nbytes, 0.9, f"NIXL's {best}")
