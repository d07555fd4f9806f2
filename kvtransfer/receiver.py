"""The decode worker's side: accepts senders and lets them write leased blocks."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.interface import Closed, Failed, ReceiveEvent, RegisteredPool
from kvtransfer.lease import LeaseTable
from kvtransfer.pairs import Pairs, TransferCounters
from kvtransfer.streams.connection import ReceiverConnection, ReceiverCore
from kvtransfer.streams.handshake import Identity
from kvtransfer.transports.transport import Transport, host_id
from messaging.wake import Wake
from protocol.handoff import Extent
from protocol.ids import TransferOffer
from protocol.ports import ANY_PORT

logger = logging.getLogger("tandem.kvtransfer")

_JOIN_S = 10.0
_ACCEPT_PAUSE_S = 0.1


class Receiver:
    """The receiver of blocks into `pool` under leases, over all `transports` at once.

    The caller opened the transports, and closes them. `key` is the cluster's 32-byte transfer key. Each
    transport listens on `host`, the address that peers use, on one of `ports`. `on_event` is called from an
    I/O thread when `poll` has something new; it must not block. A connection that stops in the middle of a
    piece is dropped after `progress_timeout_s` seconds. A sender without a connection gets
    `reconnect_grace_s` seconds to come back over another transport before its leases fail. `pairs` counts the
    transfers from each peer.
    """

    def __init__(
        self,
        pool: RegisteredPool,
        *,
        key: bytes,
        worker_id: str,
        incarnation: str,
        transports: Sequence[Transport],
        host: str,
        ports: Sequence[int] = ANY_PORT,
        on_event: Callable[[], None],
        progress_timeout_s: float = 30.0,
        handshake_timeout_s: float = 5.0,
        reconnect_grace_s: float = 2.0,
        max_pending_handshakes: int = 16,
        pairs: Pairs | None = None,
    ) -> None:
        self._leases = LeaseTable(
            pool.block_pools, pool.block_size, lambda lease_id: self._emit(Closed(lease_id))
        )
        self._queue = pool.queue
        self._reconnect_grace_s = reconnect_grace_s
        self._counters = TransferCounters()
        self._stop = Wake()
        self._disconnected = Wake()
        self._events: deque[ReceiveEvent] = deque()
        self._on_event = on_event
        self._max_pending = max_pending_handshakes
        self._core = ReceiverCore(
            identity=Identity(key, worker_id, incarnation, pool),
            leases=self._leases,
            counters=self._counters,
            pairs=pairs or Pairs(),
            stop=self._stop,
            emit=self._emit,
            on_disconnect=self._disconnected.set,
            progress_timeout_s=progress_timeout_s,
            handshake_timeout_s=handshake_timeout_s,
        )
        self._connections: list[ReceiverConnection] = []
        self._listeners: dict[int, tuple[socket.socket, Transport]] = {}
        self.offers: list[TransferOffer] = []
        for transport in transports:
            listener, address = transport.listen(host, ports)
            listener.setblocking(False)
            self._listeners[listener.fileno()] = (listener, transport)
            self.offers.append(
                TransferOffer(
                    transport=transport.name,
                    host_id=host_id(),
                    address=address,
                    same_host=transport.same_host,
                )
            )
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def open(
        self,
        lease_id: str,
        extents: Sequence[Extent],
        *,
        first_token: int | Sequence[int] = 0,
        num_tokens: int | None = None,
    ) -> None:
        """Allow writes to a prompt's blocks under this lease, once all work is done that the calling thread
        has launched on the pool's device. Blocks before `first_token` (one number, or one per extent) stay as
        they are.

        `num_tokens` is the prompt's length; by default all blocks of each extent may be written. Raises
        ValueError for bad blocks or a known lease.
        """
        self._leases.open(lease_id, extents, first_token, num_tokens, self._queue.mark())

    def poll(self) -> list[ReceiveEvent]:
        """Return the events since the last call: all events of open leases, and `Closed` of closed ones."""
        events = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Closed) or event.lease_id in self._leases:
                events.append(event)
        return events

    def close_lease(self, lease_id: str) -> bool:
        """Forget a lease: no more writes begin under it. Idempotent.

        Return whether no write is running. If one is, the blocks must not be used until a Closed event.
        """
        return self._leases.close(lease_id)

    def counters(self) -> dict[str, float]:
        return self._counters.snapshot() | {"leases_closing": float(self._leases.num_closing)}

    def close(self) -> None:
        """Drop every connection and lease, and end all threads. Idempotent."""
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
        self._disconnected.close()

    def _emit(self, event: ReceiveEvent) -> None:
        self._events.append(event)
        if isinstance(event, Failed):
            self._counters.add("leases_lost")
            logger.warning("lease %s failed: %s", event.lease_id, event.reason)
        self._on_event()

    def _accept(self) -> None:
        poll = select.poll()
        for descriptor in (self._stop.fileno(), self._disconnected.fileno(), *self._listeners):
            poll.register(descriptor, select.POLLIN)
        look_again: float | None = None
        while not self._stop.stopped:
            try:
                look_again = self._accept_ready(poll, look_again)
            except Exception:
                logger.exception("accepting connections failed by a defect")
                self._counters.add("failures_internal")
                time.sleep(_ACCEPT_PAUSE_S)

    def _accept_ready(self, poll: select.poll, look_again: float | None) -> float | None:
        """Accept connections and fail leases whose sender is gone; return when to look again."""
        timeout_ms = None if look_again is None else max(0.0, look_again - time.monotonic()) * 1000
        ready = [descriptor for descriptor, _ in poll.poll(timeout_ms)]
        if self._stop.stopped:
            return None
        self._disconnected.clear()
        lost, next_look = self._leases.fail_lost(self._reconnect_grace_s)
        for lease_id in lost:
            self._emit(Failed(lease_id, "the sender is gone"))
        for descriptor in ready:
            if descriptor in self._listeners:
                self._accept_one(*self._listeners[descriptor])
        return next_look

    def _accept_one(self, listener: socket.socket, transport: Transport) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory
            self._cannot_accept(error)
            return
        connection = ReceiverConnection(accepted, transport, self._core)
        self._connections = [other for other in self._connections if other.is_alive()]
        if sum(not other.authenticated for other in self._connections) >= self._max_pending:
            self._counters.add("handshakes_dropped")
            accepted.close()
            return
        try:
            connection.start()
        except RuntimeError as error:  # out of threads
            accepted.close()
            self._cannot_accept(error)
            return
        self._connections.append(connection)

    def _cannot_accept(self, error: Exception) -> None:
        self._counters.add("failures_accept")
        logger.error("cannot accept a connection: %s", str(error))
        time.sleep(_ACCEPT_PAUSE_S)
