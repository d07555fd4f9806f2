"""The router as the launcher runs it: sockets at once, then the HTTP server until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType

import uvicorn

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.app import build_app
from router.connection import Connections, HttpConnection, raise_file_limit
from router.errors import ApiError
from router.state import RouterState

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
CLOSE_TIMEOUT_S = 3
KEEP_ALIVE_S = 65


class RouterServer:
    """Binds HTTP and the workers' socket when made; `run()` serves until `stop()` or SIGINT/SIGTERM.

    `worker_endpoint` is what workers connect to, `port` the actual HTTP port. Raises `ConfigError` when an
    address cannot be bound or the tokenizer cannot be loaded.
    """

    def __init__(self, config: ServeConfig, keys: ClusterKeys, link_host: str = "127.0.0.1") -> None:
        self.config = config
        self._http_socket = _bind(config.host, config.port)
        try:
            self.state = RouterState(config, keys, link_host)
        except BaseException:
            self._http_socket.close()
            raise
        self.port: int = self._http_socket.getsockname()[1]
        self._server: _Uvicorn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stop_asked = False

    @property
    def worker_endpoint(self) -> str:
        return self.state.link.endpoint

    @property
    def url(self) -> str:
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Thread-safe: this incarnation of a worker is gone for good."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.state.registry.mark_dead, worker_id, incarnation, reason)

    def expect(self, worker_ids: Collection[str]) -> None:
        """Thread-safe: these workers are kept running, so requests may wait for them."""
        self.state.registry.expected = worker_ids

    def on_leave(self, keep_no_longer: Callable[[str], None], renew: Callable[[str, str], str]) -> None:
        """What the launcher is told of workers that are drained; as for `Drainer`."""
        self.state.drainer.keep_no_longer, self.state.drainer.renew = keep_no_longer, renew

    def silence_of(self, worker_id: str, incarnation: str) -> float | None:
        """Thread-safe: how long nothing was heard of this incarnation; None while it is not registered."""
        worker = self.state.registry.current(worker_id, incarnation)
        return None if worker is None else worker.silence_s

    def stop(self) -> None:
        """Thread-safe: drain, then return from `run()`. A second call does not wait for running requests."""
        self._stop_asked = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_stop)

    def restore_signals(self) -> None:
        """Thread-safe: undo what a library in C did to the signals, unseen by Python."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_install_anew)

    def run(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve. `on_start` is called once HTTP answers."""
        server_config = uvicorn.Config(
            build_app(self.state),
            loop="uvloop",
            http=partial(HttpConnection, connections=Connections(raise_file_limit())),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        self._server = _Uvicorn(server_config, on_start, self.stop)
        try:
            with asyncio.Runner(loop_factory=server_config.get_loop_factory()) as runner:
                runner.run(self._serve(self._server))
        finally:
            self._loop = None
            self.close()

    def close(self) -> None:
        """Give the sockets back; `run()` does it at its end."""
        self.state.close()
        self._http_socket.close()

    async def _serve(self, server: _Uvicorn) -> None:
        self._loop = asyncio.get_running_loop()
        self.state.attach(self._loop)
        if self._stop_asked:
            self._begin_stop()
        gc.collect()
        gc.freeze()  # or the collector would go through the libraries again and again, for milliseconds
        await server.serve(sockets=[self._http_socket])

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._drain())
        elif self._server is not None:
            self._server.should_exit = True

    async def _drain(self) -> None:
        """No new requests; running ones get the configured time, then an error."""
        self.state.is_draining = True
        deadline = asyncio.get_running_loop().time() + self.config.shutdown_timeout
        while len(self.state.journal) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_INTERVAL_S)
        self.state.dispatcher.fail_all(ApiError(503, "the server is shutting down"))
        if self._server is not None:
            self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Uvicorn whose signals drain first, and which says when it has started."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], on_signal: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_signal = on_signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(sig).name)
        self._on_signal()


def _install_anew() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
    except OSError as error:
        raise ConfigError(f"--host: cannot use {host!r}: {error}") from error
    try:
        return socket.create_server(
            address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error}") from error
