"""The transports by name."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.shm import ShmTransport
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport

TRANSPORTS: dict[str, Transport] = {"shm": ShmTransport(), "tcp": TcpTransport()}


def by_name(names: Sequence[str]) -> list[Transport]:
    """The named transports in that order; raises ValueError for an unknown one, or none."""
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or not names:
        known = ", ".join(TRANSPORTS)
        raise ValueError(f"transports must name some of {known}, not {', '.join(unknown) or 'none'}")
    return [TRANSPORTS[name] for name in dict.fromkeys(names)]
