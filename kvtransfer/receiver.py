"""The decode worker's side: accepts senders and lets them write leased blocks."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.channel import Wake
from kvtransfer.connection import Connection, ReceiverCore
from kvtransfer.counters import Counters
from kvtransfer.handshake import Identity
from kvtransfer.host import host_id
from kvtransfer.interface import Failed, ReceiveEvent, RegisteredPool
from kvtransfer.leases import LeaseTable
from kvtransfer.transport import Transport
from kvtransfer.transports import by_name
from protocol.messages import TransferOffer

logger = logging.getLogger("tandem.kvtransfer")

_JOIN_S = 10.0
_ACCEPT_PAUSE_S = 0.1


class Receiver:
    """Receives blocks into `pool` under leases, over every transport of `transports` at once.

    `key` is the cluster's 32-byte transfer key. `host` is the address to listen on, as peers reach it.
    `on_event` is called from an I/O thread whenever `poll` has something new; it must not block.
    A peer that stops in the middle of a piece is dropped after `progress_timeout_s` seconds.
    """

    def __init__(
        self,
        pool: RegisteredPool,
        *,
        key: bytes,
        worker_id: str,
        incarnation: str,
        transports: Sequence[str],
        host: str,
        on_event: Callable[[], None],
        progress_timeout_s: float = 30.0,
        handshake_timeout_s: float = 5.0,
        max_pending_handshakes: int = 16,
    ) -> None:
        self._leases = LeaseTable(pool.num_blocks)
        self._counters = Counters()
        self._stop = Wake()
        self._events: deque[ReceiveEvent] = deque()
        self._on_event = on_event
        self._max_pending = max_pending_handshakes
        self._core = ReceiverCore(
            identity=Identity(key, worker_id, incarnation, pool),
            leases=self._leases,
            counters=self._counters,
            stop=self._stop,
            emit=self._emit,
            progress_timeout_s=progress_timeout_s,
            handshake_timeout_s=handshake_timeout_s,
        )
        self._connections: list[Connection] = []
        self._listeners: dict[int, tuple[socket.socket, Transport]] = {}
        self.offers: list[TransferOffer] = []
        for transport in by_name(transports):
            listener, address = transport.listen(host)
            listener.setblocking(False)
            self._listeners[listener.fileno()] = (listener, transport)
            self.offers.append(TransferOffer(transport=transport.name, host_id=host_id(), address=address))
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def open(self, lease_id: str, block_ids: Sequence[int]) -> None:
        """Let these blocks be written under this lease. Raises ValueError for bad blocks or a known lease."""
        self._leases.open(lease_id, block_ids)

    def poll(self) -> list[ReceiveEvent]:
        """What happened since the last call, of leases that are not closed."""
        events = []
        while self._events:
            event = self._events.popleft()
            if event.lease_id in self._leases:
                events.append(event)
        return events

    def close_lease(self, lease_id: str) -> None:
        """Forget a lease; idempotent. After it returns no byte is written under it any more."""
        self._leases.close(lease_id)

    def counters(self) -> dict[str, float]:
        return self._counters.snapshot()

    def close(self) -> None:
        """Drop every connection and lease. Idempotent; leaves no thread or descriptor behind."""
        if self._stop.stopped:
            return
        self._leases.close_all()
        self._stop.stop()
        self._acceptor.join(_JOIN_S)
        for connection in self._connections:
            connection.join(_JOIN_S)
        for listener, _ in self._listeners.values():
            listener.close()
        self._stop.close()

    def _emit(self, event: ReceiveEvent) -> None:
        self._events.append(event)
        if isinstance(event, Failed):
            logger.warning("lease %s failed: %s", event.lease_id, event.reason)
        self._on_event()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for descriptor in self._listeners:
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._stop.stopped:
                return
            for descriptor in ready:
                self._accept_one(*self._listeners[descriptor])

    def _accept_one(self, listener: socket.socket, transport: Transport) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory
            self._counters.add("failures_accept")
            logger.error("cannot accept a connection: %s", error)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        connection = Connection(accepted, transport, self._core)
        self._connections = [other for other in self._connections if other.is_alive()]
        if sum(not other.authenticated for other in self._connections) >= self._max_pending:
            self._counters.add("handshakes_dropped")
            accepted.close()
            return
        self._connections.append(connection)
        connection.start()
