"""The `tcp` transport within TLS.

Both sides show a certificate of the same authority; the keyed challenge of the handshake follows inside.
"""

from __future__ import annotations

import ssl
from typing import Any

from kvtransfer.framing.tls_socket import TlsSocket
from kvtransfer.transports.tcp import TcpTransport
from kvtransfer.transports.transport import Listener
from messaging.tls import TlsFiles


class TlsListener:
    """Accepts connections of a listening socket as TLS ones."""

    def __init__(self, listener: Listener, context: ssl.SSLContext) -> None:
        self._listener = listener
        self._context = context

    def fileno(self) -> int:
        return self._listener.fileno()

    def setblocking(self, flag: bool, /) -> None:
        self._listener.setblocking(flag)

    def accept(self) -> tuple[TlsSocket, Any]:
        accepted, address = self._listener.accept()
        return TlsSocket(accepted, self._context, server_side=True), address

    def close(self) -> None:
        self._listener.close()


class TlsTransport(TcpTransport):
    """Raises ConfigError for certificates that can't be used."""

    def __init__(self, files: TlsFiles, streams: int = 1, wire_dtype: str = "auto") -> None:
        super().__init__(streams, wire_dtype)
        self._accepting = files.context(server_side=True)
        self._connecting = files.context(server_side=False)

    def listen(self, host: str) -> tuple[Listener, str]:
        listener, address = super().listen(host)
        return TlsListener(listener, self._accepting), address

    def connect(self, address: str) -> TlsSocket:
        return TlsSocket(super().connect(address), self._connecting, server_side=False)
