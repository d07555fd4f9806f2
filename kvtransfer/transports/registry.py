"""The transports by name, in the default order of preference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.blocks.extents import Mode
from kvtransfer.blocks.layout import JoinedBlocks, wire_segments
from kvtransfer.interface import RegisteredPool, TransferError
from kvtransfer.pairs import Pairs
from kvtransfer.transports.object_store import Carrier, ObjectStoreTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport, TlsTransport
from kvtransfer.transports.transport import Transport
from messaging.files import TlsFiles
from protocol.ports import ANY_PORT
from protocol.server_options import KV_TRANSPORTS

logger = logging.getLogger("tandem.kvtransfer")


@dataclass(frozen=True)
class TransportOptions:
    """Options of transports. `tcp_streams`: connections per pair. `wire_dtype`: dtype of values on `tcp`;
    `auto` is the pool's. `wire_codec`: "auto" codes bf16 on `tcp` without loss where that is faster, "off"
    never does.

    `checksum` covers the sender's pieces, `tls` encrypts `tcp`, `object_store` needs a `carrier`, and UCX
    itself listens on one of `ports`.
    """

    tcp_streams: int = 1
    wire_dtype: str = "auto"
    wire_codec: str = "auto"
    checksum: Mode = "off"
    tls: TlsFiles | None = None
    carrier: Carrier | None = None
    ports: Sequence[int] = ANY_PORT


def _open(transport: str, pool: RegisteredPool, name: str, options: TransportOptions) -> Transport:
    match transport:
        case "shm":
            return ShmTransport()
        case "cuda_ipc":
            from kvtransfer.transports.cuda_ipc import CudaIpcTransport

            _check_reads(pool, options)
            return CudaIpcTransport(pool)
        case "ucx":
            from kvtransfer.transports.ucx import UcxTransport

            _check_reads(pool, options)
            return UcxTransport(pool, name, options.ports)
        case "tcp":
            wire_segments(pool.segments, options.wire_dtype)  # raises LayoutError if the dtype is impossible
            chosen = options.tcp_streams, options.wire_dtype, options.wire_codec
            return TcpTransport(*chosen) if options.tls is None else TlsTransport(options.tls, *chosen)
        case _:
            if options.carrier is None:
                raise TransferError("the worker is no Ray actor")
            if pool.device is not None:
                raise TransferError("it does not send from a GPU's memory")
            return ObjectStoreTransport(options.carrier)


def _check_reads(pool: RegisteredPool, options: TransportOptions) -> None:
    """Raise TransferError if peers can't read the pool themselves."""
    if pool.device is not None and options.checksum != "off":
        raise TransferError("it sends from a GPU's memory, and checksums are made on the host")
    if isinstance(pool.device, JoinedBlocks):
        raise TransferError("it sends from one GPU's memory, and these blocks lie in several")


def open_transports(
    names: Sequence[str],
    pool: RegisteredPool,
    name: str,
    options: TransportOptions = TransportOptions(),
    pairs: Pairs | None = None,
) -> list[Transport]:
    """Open the named transports in that order, ready for `pool` under this worker's unique `name`.

    An unavailable transport is left out, logged, and recorded in `pairs`; `cuda_ipc`, for a pool in the
    host's memory, silently. Raises ValueError for an unknown one, or a wire_dtype that the pool's values
    don't have, TransferError if none is left.
    """
    unknown = [other for other in names if other not in KV_TRANSPORTS]
    if unknown or not names:
        known = ", ".join(KV_TRANSPORTS)
        raise ValueError(f"transports must name some of {known}, not {', '.join(unknown) or 'none'}")
    opened, reasons = [], []
    for transport in dict.fromkeys(names):
        if transport == "cuda_ipc" and pool.device is None:
            reasons.append("cuda_ipc: the pool is in the host's memory")
            continue
        try:
            opened.append(_open(transport, pool, name, options))
        except (TransferError, OSError) as error:
            reasons.append(f"{transport}: {error}")
            logger.warning("transport %s is not available: %s", transport, error)
            if pairs is not None:
                pairs.refuse("", transport, "unavailable", str(error))
    if not opened:
        raise TransferError(f"no transport is available: {'; '.join(reasons)}")
    return opened
