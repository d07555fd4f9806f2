"""The least that control messages can take: bare sockets of the cluster's kind, with nothing behind them."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import zmq

from bench.transfer.process import processes
from messaging.sockets import ClusterKeys, bind_router, connect_dealer, start_authenticator

_ANSWER_MS = 30_000


class EchoPeer:
    """A process that answers each message with `answer_bytes` bytes."""

    def __init__(self, context: zmq.Context[Any], keys: ClusterKeys, answer_bytes: int) -> None:
        ours, theirs = processes.Pipe()
        self._process = processes.Process(target=_answer, args=(theirs, keys, answer_bytes), daemon=True)
        self._process.start()
        self._socket = connect_dealer(context, keys, ours.recv(), "echo-bench")

    def __enter__(self) -> EchoPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.join()

    def round_trip(self, nbytes: int) -> float:
        """Seconds until the answer to a message of so many bytes."""
        started = time.perf_counter()
        self._socket.send(bytes(nbytes))
        if not self._socket.poll(_ANSWER_MS):
            raise RuntimeError("no echo came")
        self._socket.recv()
        return time.perf_counter() - started


def _answer(pipe: Connection, keys: ClusterKeys, nbytes: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    authenticator = start_authenticator(context, keys)
    socket, endpoint = bind_router(context, keys, "127.0.0.1")
    pipe.send(endpoint)
    try:
        while True:
            socket.poll()
            identity, _ = socket.recv_multipart()
            socket.send_multipart([identity, bytes(nbytes)])
    finally:
        authenticator.stop()
