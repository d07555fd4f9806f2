"""Carries objects for `object_store` without Ray: objects are memory files, references are descriptors."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from array import array
from collections.abc import Sequence

from kvtransfer.transports.object_store import Inboxes, SendObject


class MemoryFile:
    """A memory file that closes with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class DescriptorCarrier:
    """Passes descriptors to other processes of this host."""

    def __init__(self) -> None:
        self.address = f"tandem-carrier-{secrets.token_hex(8)}"
        self.inboxes = Inboxes()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.address)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def sender_to(self, address: str, inbox_id: str) -> SendObject:
        def send(number: int, buffers: Sequence[memoryview]) -> None:
            stored = MemoryFile(os.memfd_create("object"))
            for buffer in buffers:
                os.write(stored.descriptor, buffer)
            named = json.dumps([inbox_id, number]).encode()
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [stored.descriptor]))]
            self._socket.sendmsg([named], passed, 0, "\0" + address)  # `send_fds` ignores the address

        return send

    def get(self, reference: MemoryFile, timeout_s: float) -> list[memoryview]:
        size = os.fstat(reference.descriptor).st_size
        return [memoryview(os.pread(reference.descriptor, size, 0))]

    def close(self) -> None:
        self._socket.sendto(b"", "\0" + self.address)
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        while True:
            named, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            if not named:
                return
            inbox_id, number = json.loads(named)
            self.inboxes.put(inbox_id, number, MemoryFile(descriptors[0]))
